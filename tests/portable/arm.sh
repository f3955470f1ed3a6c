#!/usr/bin/env bash
# Compares all strategies with one device on a 64-bit Arm CPU that qemu emulates; takes about an hour on two cores.
#
#     sudo tests/portable/arm.sh FOLDER [OPTIONS OF VERIFY]
#
# FOLDER gets a Debian for Arm, 2 GB; a second call uses it again.
#
# Needs Debian or Ubuntu with qemu-user-static and debootstrap, and python3 with pip. torch is the last version whose
# wheel for Arm is built for CPUs alone.
set -euo pipefail
root=${1:?"give a folder for the Debian of the emulated CPU"}
shift
[ $# -gt 0 ] || set -- --devices 1,2,3 --steps 2
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf > /proc/sys/fs/binfmt_misc/register
if [ ! -e "$root/opt/site/torch" ]; then
	debootstrap --arch=arm64 --variant=minbase --include=python3,libgomp1 bookworm "$root"
	pip() {
		python3 -m pip install --quiet --only-binary :all: --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
			--python-version 3.11 --target "$root/opt/site" "$@"
	}
	pip numpy safetensors tqdm psutil filelock pillow sympy networkx jinja2 fsspec typing-extensions
	pip --no-deps torch==2.10.0
fi
rm -rf "$root/opt/lockstep"
mkdir -p "$root/opt/lockstep"
cp -r "$repository/src" "$root/opt/lockstep"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
trap 'umount "$root/proc" "$root/dev"' EXIT
chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root OMP_NUM_THREADS=1 PYTHONPATH=/opt/lockstep/src:/opt/site \
	python3 -m lockstep verify digits "$@"
