import copy

import pytest

from lightning_fedq.commands.options import change_setting

CONFIG = {
    "model": {"class_path": "m.Classifier", "init_args": {"lr": 0.1, "backbone": {"class_path": "m.MLP"}}},
    "trainer": {
        "max_epochs": 3,
        "callbacks": [
            {
                "class_path": "c.Federated",
                "init_args": {
                    "server_lr": 1.0,
                    "mechanism": {"class_path": "CorBin", "init_args": {"epsilon": 1.0}},
                },
            },
            {"class_path": "c.Twice", "init_args": {"x": 1}},
            {"class_path": "c.Twice", "init_args": {"x": 1}},
        ],
    },
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("trainer.max_epochs", lambda c: c["trainer"]["max_epochs"]),
        ("model.lr", lambda c: c["model"]["init_args"]["lr"]),
        ("Federated.server_lr", lambda c: c["trainer"]["callbacks"][0]["init_args"]["server_lr"]),
        (
            "CorBin.epsilon",
            lambda c: c["trainer"]["callbacks"][0]["init_args"]["mechanism"]["init_args"]["epsilon"],
        ),
        (
            "Federated.mechanism.epsilon",
            lambda c: c["trainer"]["callbacks"][0]["init_args"]["mechanism"]["init_args"]["epsilon"],
        ),
        ("trainer.callbacks.2.x", lambda c: c["trainer"]["callbacks"][2]["init_args"]["x"]),
    ],
)
def test_a_short_name_finds_its_setting(name, where):
    config = copy.deepcopy(CONFIG)
    change_setting(config, name, "new")
    assert where(config) == "new"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Federated.server_lt", "no setting 'server_lt'.* Did you mean 'server_lr'"),
        ("PrivacyTarget.epsilon", "an argument of Federated: Federated.privacy.epsilon"),
        ("SecAgg.run", "an argument of Federated: Federated.secure_aggregation.run"),
        ("Federatd.server_lr", "there is no Federatd.* Did you mean 'Federated'"),
        ("Twice.x", "Twice occurs 2 times"),
        ("trainer.callbacks.3.x", "no setting '3'.* It has: .'0', '1', '2'."),
        ("trainer.callbacks.x", "no setting 'x'"),
        ("server_lr", "a dotted name such as Federated.server_lr, got 'server_lr'"),
        ("trainer.max_epochs.x", "'max_epochs' holds no settings"),
    ],
)
def test_a_wrong_name_is_explained(name, message):
    with pytest.raises(ValueError, match=message):
        change_setting(copy.deepcopy(CONFIG), name, 1)
