#!/bin/sh
# Boots a guest with one rgpu device in stock QEMU. Give further options (disk, network, -nographic) as arguments.
#   RGPU_SOCKET_PATH  vhost-rgpu's vhost-user socket (default /run/rgpu/vm-guest1.sock)
#   MEMORY            the guest's memory (default 4G)
#   ACCEL             kvm or tcg (default kvm)
set -eu
exec qemu-system-x86_64 \
	-accel "${ACCEL:-kvm}" -cpu max -m "${MEMORY:-4G}" \
	-object memory-backend-memfd,id=rgpu-memory,size="${MEMORY:-4G}",share=on \
	-machine q35,memory-backend=rgpu-memory \
	-chardev socket,id=rgpu,path="${RGPU_SOCKET_PATH:-/run/rgpu/vm-guest1.sock}" \
	-device vhost-user-test-device-pci,id=rgpu0,chardev=rgpu,virtio-id=38,num_vqs=3,vq_size=256,config_size=64 \
	"$@"
