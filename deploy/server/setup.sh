# The server, as root: bash setup.sh. It prints what it does and does it; bash setup.sh print only prints.
# It may run again: keys, certificate, secret and users stay as they are.
set -eu
cat "$0"
[ "${1:-}" != print ] || exit 0
cd "$(dirname "$0")/../.."    # the app's folder
command -v nginx > /dev/null || apt-get install -y nginx
[ -x /opt/fedq/bin/python ] || python3 -m venv /opt/fedq
/opt/fedq/bin/pip install --no-index --find-links wheels --upgrade 'lightning-fedq[flower]' my_app
id flower > /dev/null 2>&1 || useradd --system --home-dir /var/lib/flower flower
install -d -m 755 /etc/fedq
[ -f /etc/fedq/server.key ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -keyout /etc/fedq/server.key -out /etc/fedq/server.pem -subj /CN=server.example \
    -addext "subjectAltName=DNS:server.example,DNS:localhost,IP:127.0.0.1" \
    -addext "basicConstraints=critical,CA:TRUE"
[ -f /etc/fedq/secret ] || (umask 077; head -c 32 /dev/urandom > /etc/fedq/secret)
chmod 600 /etc/fedq/secret /etc/fedq/server.key
chown flower /etc/fedq/secret /etc/fedq/server.key
install -m 644 deploy/server/fleet_only.conf /etc/fedq/
install -m 644 deploy/server/*.service /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now fedq-superlink fedq-superexec fedq-filter
openssl x509 -fingerprint -sha256 -dates -noout -in /etc/fedq/server.pem
date -u
echo "after another release or app: systemctl restart fedq-superlink fedq-superexec fedq-filter"
