"""What can't be imported here is not collected: the Flower adapter needs the extra `flower`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["lightning_fedq/flower/*", "tests/flower/*"]
