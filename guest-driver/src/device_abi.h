/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The interface between driver and device, specified in docs/device.md.
 */
#ifndef _RGPU_DEVICE_ABI_H
#define _RGPU_DEVICE_ABI_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/types.h>

#define VIRTIO_ID_RGPU			38
#define VIRTIO_RGPU_MAGIC		0x55504772	/* "rGPU" */
#define VIRTIO_RGPU_VERSION		1

enum {
	VIRTIO_RGPU_VQ_CONTROL,
	VIRTIO_RGPU_VQ_DOORBELL,
	VIRTIO_RGPU_VQ_EVENT,
	VIRTIO_RGPU_VQ_COUNT,
};

struct virtio_rgpu_config {
	__le32 magic;
	__le32 version;
	__le32 max_channels;
	__le32 max_extents;
	__le64 max_channel_size;
	__le64 max_registered;
	__u8 reserved[32];
};

enum virtio_rgpu_ctrl_type {
	VIRTIO_RGPU_CREATE_CHANNEL = 1,
	VIRTIO_RGPU_DESTROY_CHANNEL = 2,
	VIRTIO_RGPU_REGISTER_MEMORY = 3,
	VIRTIO_RGPU_UNREGISTER_MEMORY = 4,
};

#define VIRTIO_RGPU_F_READ_ONLY		BIT(0)

struct virtio_rgpu_extent {
	__le64 addr;
	__le64 len;
};

struct virtio_rgpu_ctrl_req {
	__le32 type;
	__le32 channel;
	__le32 region;
	__le32 extent_count;
	__le64 size;
	__le32 flags;
	__le32 reserved;
	/* struct virtio_rgpu_extent extents[extent_count] follow. */
};

struct virtio_rgpu_ctrl_resp {
	__le32 status;
	__le32 reserved;
	__u8 reason[256];
};

#define VIRTIO_RGPU_EVENT_WAKE		1

struct virtio_rgpu_event {
	__le32 type;
	__le32 channel;
};

static_assert(sizeof(struct virtio_rgpu_config) == 64);
static_assert(sizeof(struct virtio_rgpu_extent) == 16);
static_assert(sizeof(struct virtio_rgpu_ctrl_req) == 32);
static_assert(sizeof(struct virtio_rgpu_ctrl_resp) == 264);
static_assert(sizeof(struct virtio_rgpu_event) == 8);

#endif /* _RGPU_DEVICE_ABI_H */
