# An operator, on the server: bash run.sh site-0.pub site-1.pub ..., the public keys of all sites. It prints what
# it does, registers the keys and starts the run, or goes on with it. It may run again: keys stay registered.
set -eu
cat "$0"
app=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p ~/.flwr
grep -qs '^\[superlink.fedq\]' ~/.flwr/config.toml || cat "$app/deploy/server/config.toml" >> ~/.flwr/config.toml
for key in "$@"; do
    said=$(/opt/fedq/bin/flwr supernode register "$key" fedq 2>&1) || true
    echo "$key: $said"
    case "$said" in *"registered successfully"*|*"already in use"*) ;; *) exit 1 ;; esac
done
/opt/fedq/bin/flwr run "$app" fedq --stream
/opt/fedq/bin/flwr list fedq
echo "finished:completed has its model in /var/lib/flower/fedq-server/runs/deployed/model.ckpt"
