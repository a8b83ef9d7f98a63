#!/bin/sh
# Boots a guest with one rgpu device in Cloud Hypervisor. Give kernel, disk and network options as arguments.
#   RGPU_SOCKET_PATH  vhost-rgpu's vhost-user socket (default /run/rgpu/vm-guest1.sock)
#   MEMORY            the guest's memory (default 4G)
set -eu
exec cloud-hypervisor \
	--memory size="${MEMORY:-4G}",shared=on \
	--generic-vhost-user socket="${RGPU_SOCKET_PATH:-/run/rgpu/vm-guest1.sock}",device_type=38,queue_sizes=[256,256,256] \
	"$@"
