"""From simulation to two machines

A simulation and a deployment share the mechanism, the keys' scheme, the bytes of a message and the
half of a round that the server runs. On this page the two clients are programs of their own, with
their own data and secret keys, and what passes between them and the server is bytes. Flower carries
the same bytes between real machines. It runs in about half a minute.
"""

# %%
# ## A client's program
# It draws its keys, tells the server the public one, and waits for tasks. Whatever it trains on, its secret
# key and its log of used streams stay with it; `RoundClient.answer` encodes the update and packs it. The
# mechanism is that of the client's own code, never what the server says.
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from lightning_fedq.keys.party_keys import HeldServerKeys, ServerSecrets
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import Run
from lightning_fedq.rounds import RoundPlanner, RoundServer

CLIENT = '''
import struct
import sys
from dataclasses import replace
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from lightning_fedq.mechanisms import CorBin
from lightning_fedq.keys.party_keys import ClientSecrets, HeldClientKeys
from lightning_fedq.rounds import RoundClient, RoundTask, StreamLog


def send(part):
    sys.stdout.buffer.write(struct.pack("<I", len(part)) + part)
    sys.stdout.buffer.flush()


def receive():
    size = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(struct.unpack("<I", size)[0]) if size else None


def trained(weights):
    """Five steps on this client's own digits, of which nobody else has one."""
    matrix = weights[:640].reshape(64, 10).clone().requires_grad_()
    bias = weights[640:].clone().requires_grad_()
    optimizer = torch.optim.SGD([matrix, bias], lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(inputs @ matrix + bias, labels).backward()
        optimizer.step()
    return torch.cat([matrix.detach().flatten(), bias.detach()])


number, digits = int(sys.argv[1]), load_digits()
inputs = torch.tensor(digits.data[number:1200:2] / 16, dtype=torch.float32)
labels = torch.tensor(digits.target[number:1200:2])

secrets = ClientSecrets.draw()
send(secrets.public_key)
federation, server_key, salt, sealed, peer = (receive() for _ in range(5))
keys = HeldClientKeys(number, secrets, federation, server_key, salt, sealed, {1 - number: peer})
log = StreamLog(Path(f"client-{number}.jsonl"), f"client {number}")
client = RoundClient(number, CorBin(epsilon=4.0, shared_bits=5), keys, log)
while (task := receive()) is not None:
    weights = torch.frombuffer(bytearray(receive()), dtype=torch.float32)
    send(client.answer(RoundTask.from_bytes(task), weights, trained(weights) - weights))
'''
Path("client.py").write_text(CLIENT)

# %%
# ## Two of them, and a line to each
# Pipes stand for the network: four bytes of length, then the bytes of a message.
processes = [
    subprocess.Popen([sys.executable, "client.py", str(c)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for c in range(2)
]


def send(client, *parts):
    """Send messages to a client."""
    for part in parts:
        processes[client].stdin.write(struct.pack("<I", len(part)) + part)
    processes[client].stdin.flush()


def receive(client):
    """Wait for a client's next message."""
    (size,) = struct.unpack("<I", processes[client].stdout.read(4))
    return processes[client].stdout.read(size)


# %%
# ## Keys
# Every client sends 32 bytes. The server keeps a secret of its own, and relays the public keys of those who
# share a pair: `CorBin`'s two clients agree on a key that the server, which only relays, does not have.
# (One that lies could relay a key of its own; signed keys are against that, see [the
# deployment](../deployment.md).)
secrets = ServerSecrets.draw()
roster = {client: receive(client) for client in range(2)}
keys = HeldServerKeys(secrets, roster)
for client in range(2):
    sealed, peer = keys.sealed_members(client), roster[1 - client]
    send(client, secrets.federation, secrets.public_key, keys.salt, sealed, peer)
print("public keys:", *(key.hex()[:12] + "..." for key in roster.values()))

# %%
# ## Rounds
# The server draws the plan of a round, sends task and weights, and is given bytes. It never has an update.
mechanism, start = CorBin(epsilon=4.0, shared_bits=5), torch.zeros(650)
server = RoundServer(mechanism, RoundPlanner(2, 0), keys, start, [640, 10], AdaptiveRange())
digits = load_digits()
held_out = torch.tensor(digits.data[1200:] / 16, dtype=torch.float32), torch.tensor(digits.target[1200:])


def accuracy(weights):
    """Of the digits that no client has."""
    scores = held_out[0] @ weights[:640].reshape(64, 10) + weights[640:]
    return float((scores.argmax(1) == held_out[1]).float().mean())


values = [accuracy(server.weights)]
for _ in range(30):
    plan = server.start()
    for client in plan.cohort:
        send(client, server.task().to_bytes(), server.weights.numpy().tobytes())
    messages = [receive(client) for client in plan.cohort]
    for message in messages:
        server.take(message)
    server.finish()
    values.append(accuracy(server.weights))
print(f"an answer: {len(messages[0])} bytes for 650 parameters; as floats they are {4 * 650}")
print(f"after 30 rounds {values[-1]:.3f} of the held-out digits are right")
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(range(len(values)), values, marker="o", markersize=3)
axes.set(xlabel="round", ylabel="accuracy on held-out digits")
figure.savefig("two_machines.png", dpi=150)

# %%
# ## What is left behind
# A client's log has a line for every message, written before the message exists, so that no keystream ever
# carries two payloads, whatever the server asks. The server's ledger has counted the same rounds. And the
# accountant says what two clients without a crowd are: nothing useful is promised to them. A deployment is
# private by its numbers, as a simulation is ([choose a mechanism for a budget](choose_for_a_budget.md)).
for process in processes:
    process.stdin.close()
    process.wait()
lines = [len(Path(f"client-{client}.jsonl").read_text().splitlines()) - 1 for client in range(2)]
print("messages in the clients' logs:", lines, " rounds in the ledger:", server.ledger.charges.tolist())
run = Run.ideal(mechanism, server.charged_context(plan), 30, secure_sum=None)
report = privacy_report(replace(run, charges=server.ledger.charges), delta=1e-5)
for adversary in (Adversary.SERVER, Adversary.OUTSIDER):
    row = report.row(adversary)
    print(f"{row.title}: epsilon {row.epsilon_run:.3g}, {row.verdict}")

# %%
# ## Real machines
# `fedq flower init my_app` writes an app whose module, data and settings stand in one file. Its two halves
# are those of this page, with Lightning's `Trainer` on both sides, and Flower in place of the pipes:
#
#     flower-superlink --insecure --disable-runtime-dependency-installation    # the server's machine
#     flower-supernode --insecure --superlink HOST:8000 \
#         --node-config 'partition-id=0 fedq-home="/a/folder"'                 # each client's machine
#     flwr run my_app LINK --stream                                            # starts the rounds
#
# A seeded deployment ends with the weights of the seeded simulation, bit for bit: `make deploy-demo` compares
# them on one machine, with TLS. What each machine needs: [From simulation to
# deployment](../deployment.md).
