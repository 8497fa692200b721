# A site, as root: bash setup.sh N, its number from 0, with the server's server.pem in the folder where it is typed.
# It prints what it does and does it; bash setup.sh N print only prints. It may run again: keys stay as they are.
set -eu
cat "$0"
number=${1:?which site is this? bash setup.sh N, from 0}
[ "${2:-}" != print ] || exit 0
install -d -m 755 /etc/fedq
install -m 644 server.pem /etc/fedq/
cd "$(dirname "$0")/../.."    # the app's folder
[ -x /opt/fedq/bin/python ] || python3 -m venv /opt/fedq
/opt/fedq/bin/pip install --no-index --find-links wheels --upgrade 'lightning-fedq[flower]' my_app
id flower > /dev/null 2>&1 || useradd --system --home-dir /var/lib/flower flower
id fedq > /dev/null 2>&1 || useradd --system --user-group --home-dir /var/lib/fedq fedq
[ -f /etc/fedq/node ] || ssh-keygen -q -t ecdsa -b 384 -N "" -f /etc/fedq/node
[ -f /etc/fedq/secret ] || (umask 077; head -c 32 /dev/urandom > /etc/fedq/secret)
chmod 600 /etc/fedq/node
chmod 640 /etc/fedq/secret
chown flower /etc/fedq/node
chown flower:fedq /etc/fedq/secret
install -m 644 deploy/site/*.service /etc/systemd/system/
sed -i "s/partition-id=0/partition-id=$number/" /etc/systemd/system/fedq-client.service
systemctl daemon-reload
systemctl enable --now fedq-supernode fedq-client
openssl x509 -fingerprint -sha256 -dates -noout -in /etc/fedq/server.pem
date -u
ssh-keygen -lf /etc/fedq/node.pub
echo "after another release or app: systemctl restart fedq-supernode fedq-client"
