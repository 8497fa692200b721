"""From simulation to two machines

In this tutorial you run a federation whose two clients are separate programs with their own data and
secret keys. Only bytes pass between the clients and the server. A real deployment uses the same code, and
Flower carries the bytes between machines. The script takes about half a minute.
"""

# %%
# ## Write the client's program
# The client draws its keys, sends its public key to the server, and waits for tasks. `RoundClient.answer`
# encodes the update and packs it into bytes. The client's data, its secret key and its log of used random
# streams never leave the client. The mechanism comes from the client's own code and not from the server.
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
    """Return the weights after five steps on this client's own digits."""
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
client = RoundClient(number, CorBin(epsilon_per_coordinate=4.0, shared_bits=5), keys, log)
while (task := receive()) is not None:
    weights = torch.frombuffer(bytearray(receive()), dtype=torch.float32)
    send(client.answer(RoundTask.from_bytes(task), weights, trained(weights) - weights))
'''
Path("client.py").write_text(CLIENT)

# %%
# ## Start two clients
# Pipes take the place of the network. Each message is its length in four bytes, followed by its content.
processes = [
    subprocess.Popen([sys.executable, "client.py", str(c)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for c in range(2)
]


def send(client, *parts):
    """Send parts of a message to a client."""
    for part in parts:
        processes[client].stdin.write(struct.pack("<I", len(part)) + part)
    processes[client].stdin.flush()


def receive(client):
    """Return a client's next message."""
    (size,) = struct.unpack("<I", processes[client].stdout.read(4))
    return processes[client].stdout.read(size)


# %%
# ## Exchange keys
# Every client sends a public key of 32 bytes. `CorBin` pairs clients. The server relays the public keys
# within a pair, so the two clients agree on a key that an honest server does not know. A malicious server
# could relay its own key instead. Signed keys prevent this ([deployment](../deployment.md)).
secrets = ServerSecrets.draw()
roster = {client: receive(client) for client in range(2)}
keys = HeldServerKeys(secrets, roster)
for client in range(2):
    sealed, peer = keys.sealed_members(client), roster[1 - client]
    send(client, secrets.federation, secrets.public_key, keys.salt, sealed, peer)
print("public keys:", *(key.hex()[:12] + "..." for key in roster.values()))

# %%
# ## Run the rounds
# In each round the server draws a plan and sends the task and the weights. It receives bytes and never sees
# an update.
mechanism, start = CorBin(epsilon_per_coordinate=4.0, shared_bits=5), torch.zeros(650)
server = RoundServer(mechanism, RoundPlanner(2, 0), keys, start, [640, 10], AdaptiveRange())
digits = load_digits()
held_out = torch.tensor(digits.data[1200:] / 16, dtype=torch.float32), torch.tensor(digits.target[1200:])


def accuracy(weights):
    """Return the accuracy on digits that no client has."""
    scores = held_out[0] @ weights[:640].reshape(64, 10) + weights[640:]
    return float((scores.argmax(1) == held_out[1]).float().mean())


values = [accuracy(server.weights)]
for _ in range(30):
    plan = server.start()
    for client in plan.cohort:
        send(client, server.task().to_bytes(), server.weights.numpy().tobytes())
    messages = [receive(client) for client in plan.cohort]
    for message in messages:
        server.receive_message(message)
    server.finish()
    values.append(accuracy(server.weights))
print(f"an answer: {len(messages[0])} bytes for 650 parameters; as floats they are {4 * 650}")
print(f"after 30 rounds {values[-1]:.3f} of the held-out digits are right")
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(range(len(values)), values, marker="o", markersize=3)
axes.set(xlabel="round", ylabel="accuracy on held-out digits")
figure.savefig("two_machines.png", dpi=150)

# %%
# ## Check the logs and the guarantee
# A client writes a line to its log before each message exists. Therefore no keystream encrypts two
# messages, even if a malicious server asks twice. The server's ledger has counted the same rounds.
#
# The accountant reports no meaningful guarantee: two clients are too few. A deployment needs as many
# clients as a simulation ([choose a mechanism for a budget](choose_for_a_budget.md)).
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
# ## Use real machines
# `fedq flower init my_app` writes an app with the module, the data and the settings in one file. The app
# uses the two halves of this page, with Lightning's `Trainer` on both sides, and Flower in place of the
# pipes. These commands try it without encryption, and **protect nobody**: a plain SuperNode runs any code
# that a run sends.
#
#     flower-superlink --insecure --disable-runtime-dependency-installation    # the server's machine
#     flower-supernode --insecure --superlink HOST:8000 \
#         --node-config 'partition-id=0 fedq-home="/a/folder"'                 # each client's machine
#     flwr run my_app LINK --stream                                            # starts the rounds
#
# On real machines follow [Deploy to real machines](../deployment.md), where each site runs only the code
# that it has read. A seeded deployment ends with the weights of the seeded simulation, bit for bit. `make
# deploy-demo` compares them on one machine, with TLS.
