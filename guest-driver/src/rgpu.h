/* SPDX-License-Identifier: GPL-2.0 */
/*
 * virtio_rgpu: declarations shared by its files.
 *
 *   main.c     binds to the virtio device; starts and stops it
 *   queue.c    the virtqueues: requests, events, the doorbell
 *   memory.c   pages of channels, pinned pages of programs, extents
 *   user.c     what one user of the guest may have of a device
 *   channel.c  the life cycle of channels and regions
 *   file.c     /dev/rgpuN
 *
 * Lifetimes: a channel is referenced by its file, by every request in flight, by
 * queued work, and by the device's table of ids, from when the device learns of the
 * channel until it can no longer access the memory and nothing is pinned. A channel
 * holds a reference to the device structure. Pages therefore outlive a killed program
 * as long as the device may use them. Of a removed device nothing outlives its last
 * file and its last pinned page.
 *
 * Lock order, outermost first: rgpu_channel.lock, then rgpu_device.event_lock (with
 * the xarray's own lock inside), or rgpu_device.users_lock and
 * rgpu_device.ctrl_lock. A program can hold its mmap_lock for as long as it likes, so
 * nothing waits for that with any of them, or in a work item. mmap() is called with
 * mmap_lock held, and takes none of them. A program can keep page locks of its memory
 * as well: only rgpu_channel.unpin waits for those, without a lock, and nothing but
 * the program itself and the module's end waits for that work.
 */
#ifndef _RGPU_H
#define _RGPU_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm_types.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/srcu.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "device_abi.h"

#define RGPU_EVENT_BUFFERS	64

/*
 * How long to wait for a channel that is closing: close() for its memory, a
 * CONNECT for its id. A process that exits does not wait.
 */
#define RGPU_CLOSE_TIMEOUT	(10 * HZ)

/*
 * As wait_event_killable_timeout(), but the machine can be suspended meanwhile. The
 * caller must not hold a lock.
 */
#define rgpu_wait_event(wq_head, condition, timeout)				\
({										\
	long __ret = timeout;							\
	might_sleep();								\
	if (!___wait_cond_timeout(condition))					\
		__ret = ___wait_event(wq_head, ___wait_cond_timeout(condition),	\
				      (TASK_KILLABLE | TASK_FREEZABLE), 0, timeout, \
				      __ret = schedule_timeout(__ret));		\
	__ret;									\
})

struct rgpu_channel;
struct rgpu_region;
struct rgpu_user;

/**
 * struct rgpu_device - one virtio device, from probe to its last open file
 * @ref: held by the virtio driver while bound, and by every channel
 * @release: frees the device after the last reference
 * @vdev: valid between probe and remove only
 * @misc: /dev/rgpuN
 * @name: "rgpuN", for @misc
 * @index: N
 * @reboot: stops the device before a reboot
 * @version: version of the device specification
 * @max_channels: maximum number of channels, from the configuration space
 * @max_extents: maximum extents per request, likewise
 * @max_channel_size: maximum size of a channel in bytes, likewise
 * @max_registered: maximum registered bytes per channel, likewise; 0 for no limit
 * @channels: channels that the device may know, by id; each entry holds a
 *	reference
 * @next_id: where to look for the next free id
 * @closing: number of @channels with a DESTROY_CHANNEL in flight, or answered,
 *	but with an id that is not free yet
 * @freed: counts freed ids; with @id_freed, for a CONNECT that needs one
 * @id_freed: woken whenever @freed or @closing changes
 * @stopped: woken when the device stops, for poll()
 * @unpin_workqueue: for rgpu_channel.unpin, which may wait for its user for ever
 * @users_lock: protects @users and what is in it
 * @users: users with a channel (struct rgpu_user)
 * @ctrl_lock: protects @controlq, @running, @in_flight, @destroys, @turns, and
 *	what belongs to them in struct rgpu_user; may be taken under @users_lock
 * @max_descriptors: maximum per request: the size of the control queue, as
 *	virtio requires
 * @controlq: NULL when stopped
 * @running: whether @controlq takes requests; cleared before the device is reset
 * @in_flight: requests that the device is processing
 * @destroys: DESTROY_CHANNELs that did not fit into @controlq yet, in order; they
 *	come before all others
 * @turns: users who have another request to send and may, in turn
 * @event_lock: protects @eventq and @events
 * @eventq: NULL when stopped
 * @events: the buffers in @eventq
 * @doorbell_srcu: readers use @doorbellq; stopping waits for them
 * @doorbellq: NULL when stopped
 */
struct rgpu_device {
	struct kref ref;
	struct work_struct release;
	struct virtio_device *vdev;
	struct miscdevice misc;
	char name[16];
	int index;
	struct notifier_block reboot;

	u32 version;
	u32 max_channels;
	u32 max_extents;
	u64 max_channel_size;
	u64 max_registered;

	struct xarray channels;
	u32 next_id;
	atomic_t closing;
	atomic_t freed;
	wait_queue_head_t id_freed;
	wait_queue_head_t stopped;
	struct workqueue_struct *unpin_workqueue;

	spinlock_t users_lock;	/* see above */
	struct list_head users;

	unsigned int max_descriptors;
	spinlock_t ctrl_lock;	/* see above */
	struct virtqueue *controlq;
	bool running;
	struct list_head in_flight;
	struct list_head destroys;
	struct list_head turns;

	spinlock_t event_lock;	/* see above */
	struct virtqueue *eventq;
	struct virtio_rgpu_event events[RGPU_EVENT_BUFFERS];

	struct srcu_struct doorbell_srcu;
	struct virtqueue *doorbellq;
};

/**
 * struct rgpu_user - a user of the guest who has a channel
 * @node: in rgpu_device.users, whose lock protects the members up to @pages
 * @dev: the device
 * @uid: who it is
 * @refs: number of the user's channels, connected or not
 * @channels: number of channels that have an id
 * @pages: pages of channels and of regions
 * @turn: in rgpu_device.turns, whose lock protects these members
 * @waiting: requests that are not in the control queue yet, in order
 * @in_flight: number of requests in it, without DESTROY_CHANNELs
 */
struct rgpu_user {
	struct list_head node;
	struct rgpu_device *dev;
	kuid_t uid;
	unsigned int refs;
	u32 channels;
	unsigned long pages;

	struct list_head turn;
	struct list_head waiting;
	unsigned int in_flight;
};

/**
 * struct rgpu_extents - pages as a list of physical ranges, in order
 * @chunks: the list, in physically contiguous chunks (struct rgpu_extent_chunk)
 * @chunk_count: number of chunks
 * @count: number of extents
 * @bytes: sum of the extents' lengths
 * @last_page: page in which the last extent ends
 */
struct rgpu_extents {
	struct list_head chunks;
	unsigned int chunk_count;
	u32 count;
	u64 bytes;
	struct page *last_page;
};

/**
 * struct rgpu_extent_chunk - part of a list of extents
 * @node: in rgpu_extents.chunks
 * @page: first of the pages that hold the extents
 * @order: log2 of the number of pages
 * @used: number of extents
 */
struct rgpu_extent_chunk {
	struct list_head node;
	struct page *page;
	unsigned int order;
	unsigned int used;
};

/**
 * struct rgpu_request - one request on the control queue
 * @ref: held by the waiting caller, and by the queue until it is finished
 * @node: in rgpu_device.in_flight or .destroys, in rgpu_user.waiting, or in
 *	rgpu_channel.finished
 * @done: @finish has returned
 * @wait: woken then
 * @finish: called once, in process context, after @error, @status and @reason are
 *	set
 * @chan: holds a reference from submission until @finish has returned
 * @region: for (UN)REGISTER_MEMORY; kept by @chan while requests are in flight
 * @unpin: the value of rgpu_channel.unpinned once the region is unpinned which @finish
 *	has removed; 0 for none
 * @abandoned: nobody waits for REGISTER_MEMORY any more; protected by rgpu_channel.lock
 * @registered: the device has registered @region; likewise
 * @error: 0 if the device replied, -ENODEV if it was reset before that, -EIO if
 *	the reply was malformed
 * @status: status in the device's reply
 * @reason: message in the device's reply, NUL-terminated
 * @out_count: number of device-readable entries of @sg; one writable follows
 * @req: the first part that the device reads
 * @resp: the part that the device writes, and may still change after its reply:
 *	read once, into @status and @reason
 * @sg: @req, the extents, @resp
 */
struct rgpu_request {
	struct kref ref;
	struct list_head node;
	bool done;
	wait_queue_head_t wait;
	void (*finish)(struct rgpu_request *request);
	struct rgpu_channel *chan;
	struct rgpu_region *region;
	unsigned long unpin;
	bool abandoned;
	bool registered;
	int error;
	u32 status;
	char reason[sizeof_field(struct virtio_rgpu_ctrl_resp, reason)];
	unsigned int out_count;
	struct virtio_rgpu_ctrl_req req;
	struct virtio_rgpu_ctrl_resp resp;
	struct scatterlist sg[];
};

/**
 * enum rgpu_channel_state - state of a channel
 * @RGPU_CHANNEL_NEW: unknown to the device
 * @RGPU_CHANNEL_CONNECTING: CREATE_CHANNEL is in flight
 * @RGPU_CHANNEL_CONNECTED: the device replied OK
 * @RGPU_CHANNEL_CLOSING: DESTROY_CHANNEL is in flight, or will be sent again
 * @RGPU_CHANNEL_LOST: ended for good; its id is free once nothing is pinned
 */
enum rgpu_channel_state {
	RGPU_CHANNEL_NEW,
	RGPU_CHANNEL_CONNECTING,
	RGPU_CHANNEL_CONNECTED,
	RGPU_CHANNEL_CLOSING,
	RGPU_CHANNEL_LOST,
};

/**
 * struct rgpu_channel - an open file and its channel
 * @ref: see the top of this file
 * @dev: holds a reference
 * @lock: protects the following members up to @unpins_queued
 * @mm: mm of the process that created the channel (mmgrab); set once, before
 *	@pages
 * @owner: that process; set once
 * @user: its user, to whom the channel counts; set once, before @pages
 * @pages: the channel's memory; set once, by smp_store_release()
 * @page_count: number of @pages; set once
 * @extents: the same pages, as described to the device
 * @state: written under @lock, read anywhere
 * @closing: the file or the process that created the channel is gone
 * @released: the device can no longer access the memory
 * @ops: number of requests in flight
 * @id: valid while in rgpu_device.channels
 * @destroy: the request that destroys the channel, allocated in advance
 * @destroy_again: sends @destroy again after the device has refused it; holds a
 *	reference while pending
 * @destroy_pause: how long it waits before that, in jiffies; 0 before the first
 *	refusal
 * @destroying: @destroy is in flight, or has released the memory
 * @regions: by number
 * @next_region: where to look for the next free number
 * @registered: total bytes of @regions
 * @unpins: regions to unpin, in order, which the device cannot access any more
 * @unpins_queued: number of regions that have ever been added to @unpins
 * @unpinned: number of those that are unpinned and not charged any more; written under
 *	@lock, read anywhere
 * @unpin: unpins @unpins; holds a reference while queued
 * @unpin_wait: woken when @unpinned changes
 * @replies: calls the finish() of @finished, in order; holds a reference while queued
 * @finished: requests that need nothing more of the device; protected by
 *	rgpu_device.ctrl_lock
 * @wait: woken by WAKE, and when the channel is lost
 * @wakes: counts WAKE events; written under rgpu_device.event_lock
 * @wake_pending: a WAKE arrived that no RGPU_IOC_WAIT has consumed
 * @closed: nothing is pinned or charged any more; with @wait
 */
struct rgpu_channel {
	struct kref ref;
	struct rgpu_device *dev;

	struct mutex lock;	/* see above */
	struct mm_struct *mm;
	struct pid *owner;
	struct rgpu_user *user;
	struct page **pages;
	unsigned long page_count;
	struct rgpu_extents extents;
	enum rgpu_channel_state state;
	bool closing;
	bool released;
	unsigned int ops;
	u32 id;
	struct rgpu_request *destroy;
	struct delayed_work destroy_again;
	unsigned long destroy_pause;
	bool destroying;
	struct xarray regions;
	u32 next_region;
	u64 registered;
	struct list_head unpins;
	unsigned long unpins_queued;
	unsigned long unpinned;

	struct work_struct unpin;
	wait_queue_head_t unpin_wait;

	struct work_struct replies;
	struct list_head finished;

	wait_queue_head_t wait;
	unsigned long wakes;
	bool wake_pending;
	bool closed;
};

/**
 * struct rgpu_region - pinned memory that the device may use
 * @node: in rgpu_channel.unpins
 * @id: number within its channel
 * @live: the device accepted REGISTER_MEMORY, and no UNREGISTER_MEMORY is in
 *	flight
 * @read_only: the device only reads
 * @page_count: number of pages charged to the process
 * @extents: the registered bytes
 */
struct rgpu_region {
	struct list_head node;
	u32 id;
	bool live;
	bool read_only;
	unsigned long page_count;
	struct rgpu_extents extents;
};

/* main.c */
extern struct workqueue_struct *rgpu_workqueue;
struct rgpu_device *rgpu_device_get(struct rgpu_device *dev);
void rgpu_device_put(struct rgpu_device *dev);

/* queue.c */
int rgpu_queues_start(struct rgpu_device *dev);
bool rgpu_queues_stop(struct rgpu_device *dev);
int rgpu_doorbell(struct rgpu_device *dev);
struct rgpu_request *rgpu_request_alloc(struct rgpu_channel *chan, u32 type,
					const struct rgpu_extents *extents);
void rgpu_request_submit(struct rgpu_request *request);
int rgpu_request_wait(struct rgpu_request *request);
void rgpu_request_put(struct rgpu_request *request);
void rgpu_replies_work(struct work_struct *work);

/* memory.c */
void rgpu_extents_init(struct rgpu_extents *extents);
void rgpu_extents_free(struct rgpu_extents *extents);
void rgpu_extents_to_sg(const struct rgpu_extents *extents, struct scatterlist *sg);
int rgpu_pages_alloc(struct rgpu_channel *chan, unsigned long count);
void rgpu_pages_free(struct rgpu_channel *chan);
struct rgpu_region *rgpu_region_pin(struct rgpu_channel *chan, u64 addr, u64 size,
				    bool read_only);
void rgpu_region_unpin(struct rgpu_channel *chan, struct rgpu_region *region);

/* user.c */
u32 rgpu_user_channel_limit(const struct rgpu_device *dev);
struct rgpu_user *rgpu_user_get(struct rgpu_device *dev);
void rgpu_user_put(struct rgpu_user *user);
int rgpu_user_charge_channel(struct rgpu_user *user);
void rgpu_user_uncharge_channel(struct rgpu_user *user);
int rgpu_user_charge_pages(struct rgpu_user *user, unsigned long pages);
void rgpu_user_uncharge_pages(struct rgpu_user *user, unsigned long pages);

/* channel.c */
struct rgpu_channel *rgpu_channel_alloc(struct rgpu_device *dev);
struct rgpu_channel *rgpu_channel_get(struct rgpu_channel *chan);
void rgpu_channel_put(struct rgpu_channel *chan);
int rgpu_channel_create(struct rgpu_channel *chan, u64 size);
struct rgpu_request *rgpu_channel_connect(struct rgpu_channel *chan);
int rgpu_channel_register(struct rgpu_channel *chan, u64 addr, u64 size, bool read_only,
			  u32 *id);
int rgpu_channel_unregister(struct rgpu_channel *chan, u32 id);
int rgpu_channel_wait(struct rgpu_channel *chan, u64 offset, u32 expected, s64 timeout_ns);
void rgpu_channel_wake(struct rgpu_channel *chan);
bool rgpu_channel_close(struct rgpu_channel *chan);
void rgpu_channels_lost(struct rgpu_device *dev);

static inline enum rgpu_channel_state rgpu_channel_state(const struct rgpu_channel *chan)
{
	return READ_ONCE(chan->state);
}

/* Whether so many regions of a channel are unpinned, and not charged any more. */
static inline bool rgpu_channel_unpinned(const struct rgpu_channel *chan, unsigned long count)
{
	return (long)(smp_load_acquire(&chan->unpinned) - count) >= 0;
}

/* file.c */
extern const struct file_operations rgpu_fops;

#endif /* _RGPU_H */
