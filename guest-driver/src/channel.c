// SPDX-License-Identifier: GPL-2.0
/*
 * The life cycle of channels and regions.
 *
 *   NEW --CREATE_CHANNEL--> CONNECTING --OK--> CONNECTED --DESTROY_CHANNEL--> CLOSING
 *    ^                           |                  |                            |
 *    +--------- refused ---------+                  +------ device reset ------> LOST
 *
 * The requests' finish functions change the state after a reply. They run in
 * work items, whether or not the program is still waiting: if a program is killed
 * while it connects, its channel is destroyed as soon as it has been created.
 */
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include <linux/virtio_rgpu.h>

#include "rgpu.h"

/* Pauses before another DESTROY_CHANNEL after the device has refused one. */
#define RGPU_DESTROY_PAUSE	((unsigned long)HZ)
#define RGPU_DESTROY_MAX_PAUSE	(60UL * HZ)

static void rgpu_destroy_again(struct work_struct *work);
static void rgpu_unpin_work(struct work_struct *work);

struct rgpu_channel *rgpu_channel_get(struct rgpu_channel *chan)
{
	kref_get(&chan->ref);
	return chan;
}

static void rgpu_channel_release(struct kref *ref)
{
	struct rgpu_channel *chan = container_of(ref, struct rgpu_channel, ref);

	rgpu_pages_free(chan);
	xa_destroy(&chan->regions);
	if (chan->destroy)
		rgpu_request_put(chan->destroy);
	if (chan->mm)
		mmdrop(chan->mm);
	put_pid(chan->owner);
	rgpu_user_put(chan->user);
	mutex_destroy(&chan->lock);
	rgpu_device_put(chan->dev);
	kfree(chan);
}

void rgpu_channel_put(struct rgpu_channel *chan)
{
	kref_put(&chan->ref, rgpu_channel_release);
}

/* Allocates the channel of a newly opened file, without memory. */
struct rgpu_channel *rgpu_channel_alloc(struct rgpu_device *dev)
{
	struct rgpu_channel *chan = kzalloc(sizeof(*chan), GFP_KERNEL_ACCOUNT);

	if (!chan)
		return NULL;
	kref_init(&chan->ref);
	chan->dev = rgpu_device_get(dev);
	mutex_init(&chan->lock);
	rgpu_extents_init(&chan->extents);
	INIT_DELAYED_WORK(&chan->destroy_again, rgpu_destroy_again);
	xa_init_flags(&chan->regions, XA_FLAGS_ALLOC);
	INIT_LIST_HEAD(&chan->unpins);
	INIT_WORK(&chan->unpin, rgpu_unpin_work);
	init_waitqueue_head(&chan->unpin_wait);
	INIT_WORK(&chan->replies, rgpu_replies_work);
	INIT_LIST_HEAD(&chan->finished);
	init_waitqueue_head(&chan->wait);
	return chan;
}

/**
 * rgpu_channel_create - set a channel's owner and allocate its memory
 * @chan: the channel
 * @size: size in bytes
 *
 * Return: 0 or an errno.
 */
int rgpu_channel_create(struct rgpu_channel *chan, u64 size)
{
	int ret;

	if (!size || !IS_ALIGNED(size, PAGE_SIZE))
		return -EINVAL;
	if (size > chan->dev->max_channel_size)
		return -EFBIG;
	if (mutex_lock_killable(&chan->lock))
		return -EINTR;
	ret = -EEXIST;
	if (chan->pages)
		goto out;
	if (!chan->mm) {
		ret = -ENOMEM;
		chan->user = rgpu_user_get(chan->dev);
		if (!chan->user)
			goto out;
		chan->owner = get_pid(task_tgid(current));
		mmgrab(current->mm);
		chan->mm = current->mm;
	}
	ret = -EPERM;
	if (chan->mm == current->mm)
		ret = rgpu_pages_alloc(chan, size >> PAGE_SHIFT);
out:
	mutex_unlock(&chan->lock);
	return ret;
}

/* Wakes all waiters. Called under event_lock, which serializes the calls. */
void rgpu_channel_wake(struct rgpu_channel *chan)
{
	WRITE_ONCE(chan->wake_pending, true);
	/* A reader of the count also sees what the device wrote before the event. */
	smp_store_release(&chan->wakes, chan->wakes + 1);
	wake_up_interruptible_all(&chan->wait);
}

static bool rgpu_changed(const struct rgpu_channel *chan, const u32 *word, u32 expected,
			 unsigned long seen)
{
	/* Pairs with rgpu_channel_wake(). */
	return READ_ONCE(*word) != expected || smp_load_acquire(&chan->wakes) != seen ||
	       rgpu_channel_state(chan) == RGPU_CHANNEL_LOST;
}

/**
 * rgpu_channel_wait - sleep while a word of the channel has a value
 * @chan: a connected channel
 * @offset: offset of the word in bytes
 * @expected: the value
 * @timeout_ns: timeout in nanoseconds; negative for no limit
 *
 * Return: 0 if the word may have changed, or an errno.
 */
int rgpu_channel_wait(struct rgpu_channel *chan, u64 offset, u32 expected, s64 timeout_ns)
{
	ktime_t timeout = timeout_ns < 0 ? KTIME_MAX : ns_to_ktime(timeout_ns);
	unsigned long seen;
	const u32 *word;
	int ret;

	if (rgpu_channel_state(chan) < RGPU_CHANNEL_CONNECTED)
		return -ENOTCONN;
	if (!IS_ALIGNED(offset, sizeof(u32)) || offset >= (u64)chan->page_count << PAGE_SHIFT)
		return -EINVAL;
	word = page_address(chan->pages[offset >> PAGE_SHIFT]) + offset_in_page(offset);

	WRITE_ONCE(chan->wake_pending, false);
	/*
	 * Read before the word; pairs with rgpu_channel_wake(). The change
	 * behind a WAKE that is already counted is visible in the word.
	 */
	seen = smp_load_acquire(&chan->wakes);
	if (timeout_ns)
		ret = wait_event_interruptible_hrtimeout(chan->wait,
							 rgpu_changed(chan, word, expected, seen),
							 timeout);
	else
		ret = rgpu_changed(chan, word, expected, seen) ? 0 : -ETIME;
	if (rgpu_channel_state(chan) == RGPU_CHANNEL_LOST)
		return -ENODEV;
	if (ret == -ETIME)
		return -ETIMEDOUT;
	/* The timeout is relative, so the call cannot simply be restarted. */
	return ret ? -EINTR : 0;
}

static int rgpu_id_alloc(struct rgpu_device *dev, struct rgpu_channel *chan)
{
	struct xa_limit limit = XA_LIMIT(0, dev->max_channels - 1);
	int ret = rgpu_user_charge_channel(chan->user);

	if (ret)
		return ret;
	ret = xa_alloc_cyclic_irq(&dev->channels, &chan->id, chan, limit, &dev->next_id,
				  GFP_KERNEL);
	if (ret < 0) {
		rgpu_user_uncharge_channel(chan->user);
		return ret;
	}
	rgpu_channel_get(chan);
	return 0;
}

static void rgpu_id_free(struct rgpu_channel *chan)
{
	struct rgpu_device *dev = chan->dev;

	xa_erase_irq(&dev->channels, chan->id);
	rgpu_user_uncharge_channel(chan->user);
	atomic_inc(&dev->freed);
	wake_up_all(&dev->id_freed);
	rgpu_channel_put(chan);
}

/* Removes a region that the device cannot access any more. Needs chan->lock. */
static void rgpu_region_remove(struct rgpu_channel *chan, struct rgpu_region *region)
{
	xa_erase(&chan->regions, region->id);
	chan->registered -= region->extents.bytes;
	list_add_tail(&region->node, &chan->unpins);
	chan->unpins_queued++;
	if (queue_work(chan->dev->unpin_workqueue, &chan->unpin))
		rgpu_channel_get(chan);
}

/*
 * Gives a lost channel's id back once nothing is pinned. Until then the channel counts
 * as its user's, who could otherwise have a work item wait for each of any number of
 * channels. Needs chan->lock and a reference in addition to the table's.
 */
static void rgpu_channel_end(struct rgpu_channel *chan)
{
	if (chan->state != RGPU_CHANNEL_LOST || chan->closed ||
	    chan->unpinned != chan->unpins_queued)
		return;
	if (chan->destroying)
		atomic_dec(&chan->dev->closing);
	rgpu_id_free(chan);
	smp_store_release(&chan->closed, true);
	wake_up_all(&chan->wait);
}

static void rgpu_unpin_work(struct work_struct *work)
{
	struct rgpu_channel *chan = container_of(work, struct rgpu_channel, unpin);
	struct rgpu_region *region;

	mutex_lock(&chan->lock);
	while ((region = list_first_entry_or_null(&chan->unpins, struct rgpu_region, node))) {
		list_del(&region->node);
		mutex_unlock(&chan->lock);
		rgpu_region_unpin(chan, region);
		mutex_lock(&chan->lock);
		/* Whoever sees this also sees that nothing is charged. */
		smp_store_release(&chan->unpinned, chan->unpinned + 1);
		wake_up_all(&chan->unpin_wait);
	}
	rgpu_channel_end(chan);
	mutex_unlock(&chan->lock);
	rgpu_channel_put(chan);
}

static void rgpu_destroy_finish(struct rgpu_request *request);

/* Needs chan->lock. */
static void rgpu_destroy_send(struct rgpu_channel *chan)
{
	chan->destroying = true;
	atomic_inc(&chan->dev->closing);
	chan->ops++;
	chan->destroy->error = 0;
	chan->destroy->finish = rgpu_destroy_finish;
	rgpu_request_submit(chan->destroy);
}

/*
 * Takes the next step after a state change, if any. Needs chan->lock and a
 * reference in addition to the table's.
 */
static void rgpu_channel_settle(struct rgpu_channel *chan)
{
	struct rgpu_region *region;
	unsigned long index;

	if (chan->closing && chan->state == RGPU_CHANNEL_CONNECTED) {
		WRITE_ONCE(chan->state, RGPU_CHANNEL_CLOSING);
		rgpu_destroy_send(chan);
	}

	/*
	 * Keep the id until the last reply as well: a request that the device
	 * has not processed yet must not reach another channel with that id.
	 */
	if (!chan->released || chan->ops || chan->state == RGPU_CHANNEL_NEW ||
	    chan->state == RGPU_CHANNEL_LOST)
		return;
	xa_for_each(&chan->regions, index, region)
		rgpu_region_remove(chan, region);
	/* Cannot be the last reference: the caller has one. */
	if (cancel_delayed_work(&chan->destroy_again))
		rgpu_channel_put(chan);
	WRITE_ONCE(chan->state, RGPU_CHANNEL_LOST);
	wake_up_all(&chan->wait);
	rgpu_channel_end(chan);
}

static void rgpu_connect_finish(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;

	mutex_lock(&chan->lock);
	chan->ops--;
	if (request->error == -ENODEV) {
		chan->released = true;
	} else if (request->error || request->status == RGPU_STATUS_OK) {
		/* After a malformed reply the channel may exist, so destroy it. */
		WRITE_ONCE(chan->state, RGPU_CHANNEL_CONNECTED);
		if (request->error)
			chan->closing = true;
	} else {
		WRITE_ONCE(chan->state, RGPU_CHANNEL_NEW);
		rgpu_id_free(chan);
	}
	rgpu_channel_settle(chan);
	mutex_unlock(&chan->lock);
}

static void rgpu_destroy_finish(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;

	mutex_lock(&chan->lock);
	chan->ops--;
	if (request->error == -ENODEV ||
	    (!request->error && (request->status == RGPU_STATUS_OK ||
				 request->status == RGPU_STATUS_INVALID))) {
		/* The device does not access a channel that it does not know. */
		chan->released = true;
	} else {
		if (!chan->destroy_pause)
			dev_warn(&chan->dev->vdev->dev,
				 "channel %u: DESTROY_CHANNEL failed with error %d, status %u; its memory is kept, and the request is sent again\n",
				 chan->id, request->error, request->status);
		chan->destroy_pause = clamp(2 * chan->destroy_pause, RGPU_DESTROY_PAUSE,
					    RGPU_DESTROY_MAX_PAUSE);
		/* Nobody waits for this channel's id meanwhile. */
		chan->destroying = false;
		atomic_dec(&chan->dev->closing);
		wake_up_all(&chan->dev->id_freed);
		rgpu_channel_get(chan);
		queue_delayed_work(rgpu_workqueue, &chan->destroy_again, chan->destroy_pause);
	}
	rgpu_channel_settle(chan);
	mutex_unlock(&chan->lock);
}

static void rgpu_destroy_again(struct work_struct *work)
{
	struct rgpu_channel *chan = container_of(to_delayed_work(work), struct rgpu_channel,
						 destroy_again);

	mutex_lock(&chan->lock);
	/* Unless the device was reset meanwhile. */
	if (chan->state == RGPU_CHANNEL_CLOSING && !chan->released)
		rgpu_destroy_send(chan);
	mutex_unlock(&chan->lock);
	rgpu_channel_put(chan);
}

/* Sends CREATE_CHANNEL if there is a free id, else returns -EBUSY or -EUSERS. */
static struct rgpu_request *rgpu_channel_try_connect(struct rgpu_channel *chan)
{
	struct rgpu_request *request;
	int ret;

	if (mutex_lock_killable(&chan->lock))
		return ERR_PTR(-EINTR);
	switch (chan->state) {
	case RGPU_CHANNEL_NEW:
		ret = chan->closing ? -ENODEV : 0;
		break;
	case RGPU_CHANNEL_CONNECTING:
		ret = -EALREADY;
		break;
	case RGPU_CHANNEL_CONNECTED:
		ret = -EISCONN;
		break;
	default:
		ret = -ENODEV;
	}
	if (ret)
		goto err_unlock;

	if (!chan->destroy) {
		request = rgpu_request_alloc(chan, VIRTIO_RGPU_DESTROY_CHANNEL, NULL);
		if (IS_ERR(request)) {
			ret = PTR_ERR(request);
			goto err_unlock;
		}
		chan->destroy = request;
	}
	request = rgpu_request_alloc(chan, VIRTIO_RGPU_CREATE_CHANNEL, &chan->extents);
	if (IS_ERR(request)) {
		ret = PTR_ERR(request);
		goto err_unlock;
	}
	request->finish = rgpu_connect_finish;
	ret = rgpu_id_alloc(chan->dev, chan);
	if (ret)
		goto err_put;
	WRITE_ONCE(chan->state, RGPU_CHANNEL_CONNECTING);
	chan->ops++;
	rgpu_request_submit(request);
	mutex_unlock(&chan->lock);
	return request;

err_put:
	rgpu_request_put(request);
err_unlock:
	mutex_unlock(&chan->lock);
	return ERR_PTR(ret);
}

/**
 * rgpu_channel_connect - send CREATE_CHANNEL
 * @chan: the channel
 *
 * Waits for an id if one is to become free.
 *
 * Return: the request, for rgpu_request_wait(), or an ERR_PTR(): -EBUSY if the
 * device has no free channel, -EUSERS if the user may not have another one, or
 * another errno.
 */
struct rgpu_request *rgpu_channel_connect(struct rgpu_channel *chan)
{
	struct rgpu_device *dev = chan->dev;
	unsigned long deadline = jiffies + RGPU_CLOSE_TIMEOUT;

	for (;;) {
		int freed = atomic_read(&dev->freed);
		struct rgpu_request *request = rgpu_channel_try_connect(chan);
		long left = deadline - jiffies;

		if ((request != ERR_PTR(-EBUSY) && request != ERR_PTR(-EUSERS)) || left <= 0)
			return request;
		if (freed == atomic_read(&dev->freed) && !atomic_read(&dev->closing))
			return request;
		if (rgpu_wait_event(dev->id_freed, freed != atomic_read(&dev->freed) ||
				    !atomic_read(&dev->closing), left) < 0)
			return ERR_PTR(-EINTR);
	}
}

/* Needs chan->lock. */
static int rgpu_channel_check_connected(struct rgpu_channel *chan)
{
	switch (chan->state) {
	case RGPU_CHANNEL_CONNECTED:
		return chan->closing ? -ENODEV : 0;
	case RGPU_CHANNEL_NEW:
	case RGPU_CHANNEL_CONNECTING:
		return -ENOTCONN;
	default:
		return -ENODEV;
	}
}

static int rgpu_status_to_errno(u32 status)
{
	switch (status) {
	case RGPU_STATUS_OK:
		return 0;
	case RGPU_STATUS_INVALID:
		return -EINVAL;
	case RGPU_STATUS_NO_RESOURCES:
		return -ENOSPC;
	case RGPU_STATUS_NO_SERVER:
		return -EHOSTUNREACH;
	case RGPU_STATUS_VERSION:
		return -EPROTO;
	case RGPU_STATUS_DENIED:
		return -EACCES;
	case RGPU_STATUS_UNSUPPORTED:
		return -EOPNOTSUPP;
	default:
		return -EIO;
	}
}

/* Waits for the reply to a request about a region, and drops the request. */
static int rgpu_region_reply(struct rgpu_request *request)
{
	int ret = rgpu_request_wait(request);

	if (!ret)
		ret = rgpu_status_to_errno(request->status);
	if (ret && ret != -EINTR && request->reason[0])
		pr_debug("%s: channel %u: %s\n", request->chan->dev->name,
			 le32_to_cpu(request->req.channel), request->reason);
	rgpu_request_put(request);
	return ret;
}

/* Removes the region of a request, for whose unpinning its caller waits. Needs chan->lock. */
static void rgpu_request_remove_region(struct rgpu_request *request)
{
	rgpu_region_remove(request->chan, request->region);
	request->unpin = request->chan->unpins_queued;
}

static void rgpu_unregister_finish(struct rgpu_request *request);

/*
 * Has the device forget a region whose number nobody was told, unless the channel
 * ends anyway. Without memory for the request it stays until then. Needs chan->lock.
 */
static void rgpu_region_forget(struct rgpu_channel *chan, struct rgpu_region *region)
{
	struct rgpu_request *request;

	if (rgpu_channel_check_connected(chan))
		return;
	request = rgpu_request_alloc(chan, VIRTIO_RGPU_UNREGISTER_MEMORY, NULL);
	if (IS_ERR(request))
		return;
	request->finish = rgpu_unregister_finish;
	request->req.region = cpu_to_le32(region->id);
	request->region = region;
	region->live = false;
	chan->ops++;
	rgpu_request_submit(request);
	rgpu_request_put(request);
}

static void rgpu_register_finish(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;
	struct rgpu_region *region = request->region;

	mutex_lock(&chan->lock);
	chan->ops--;
	/*
	 * After a malformed reply the device may know the region, so keep it
	 * until the channel ends, without being live.
	 */
	if (request->error == -ENODEV || (!request->error && request->status != RGPU_STATUS_OK))
		rgpu_request_remove_region(request);
	else
		region->live = !request->error;
	request->registered = !request->error && request->status == RGPU_STATUS_OK;
	if (request->registered && request->abandoned)
		rgpu_region_forget(chan, region);
	rgpu_channel_settle(chan);
	mutex_unlock(&chan->lock);
}

/*
 * Nobody waits for the reply to REGISTER_MEMORY any more, so nobody gets to know
 * the region's number.
 */
static void rgpu_register_abandon(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;
	u32 id = le32_to_cpu(request->req.region);

	mutex_lock(&chan->lock);
	request->abandoned = true;
	/* The reply may have come just now, and the program may have guessed the number. */
	if (request->registered && xa_load(&chan->regions, id) == request->region &&
	    request->region->live)
		rgpu_region_forget(chan, request->region);
	mutex_unlock(&chan->lock);
}

static void rgpu_unregister_finish(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;
	struct rgpu_region *region = request->region;

	mutex_lock(&chan->lock);
	chan->ops--;
	if (request->error == -ENODEV || (!request->error && request->status == RGPU_STATUS_OK))
		rgpu_request_remove_region(request);
	else
		region->live = !request->error;
	rgpu_channel_settle(chan);
	mutex_unlock(&chan->lock);
}

/**
 * rgpu_channel_register - pin memory and let the device use it
 * @chan: a connected channel
 * @addr: address of the first byte in the calling process
 * @size: size in bytes
 * @read_only: whether the device only reads
 * @id: out: the region's number
 *
 * If the caller is killed meanwhile, or the device takes too long, the region goes
 * again as soon as the device has replied.
 *
 * Return: 0 or an errno.
 */
int rgpu_channel_register(struct rgpu_channel *chan, u64 addr, u64 size, bool read_only,
			  u32 *id)
{
	u64 limit = chan->dev->max_registered;
	struct rgpu_request *request;
	struct rgpu_region *region;
	int ret;

	/* Checked again below; this avoids pinning for a call that will fail. */
	if (rgpu_channel_state(chan) != RGPU_CHANNEL_CONNECTED)
		return rgpu_channel_state(chan) > RGPU_CHANNEL_CONNECTED ? -ENODEV : -ENOTCONN;
	region = rgpu_region_pin(chan, addr, size, read_only);
	if (IS_ERR(region))
		return PTR_ERR(region);
	request = rgpu_request_alloc(chan, VIRTIO_RGPU_REGISTER_MEMORY, &region->extents);
	if (IS_ERR(request)) {
		ret = PTR_ERR(request);
		goto err_unpin;
	}
	request->finish = rgpu_register_finish;
	request->region = region;
	if (read_only)
		request->req.flags = cpu_to_le32(VIRTIO_RGPU_F_READ_ONLY);

	ret = -EINTR;
	if (mutex_lock_killable(&chan->lock))
		goto err_put;
	ret = rgpu_channel_check_connected(chan);
	if (ret)
		goto err_unlock;
	ret = -ENOSPC;
	if (limit && (size > limit || chan->registered > limit - size))
		goto err_unlock;
	ret = xa_alloc_cyclic(&chan->regions, &region->id, region, xa_limit_31b,
			      &chan->next_region, GFP_KERNEL_ACCOUNT);
	if (ret < 0)
		goto err_unlock;
	*id = region->id;
	request->req.region = cpu_to_le32(region->id);
	chan->registered += size;
	chan->ops++;
	kref_get(&request->ref);
	rgpu_request_submit(request);
	mutex_unlock(&chan->lock);
	ret = rgpu_region_reply(request);
	if (ret == -ETIMEDOUT || ret == -EINTR)
		rgpu_register_abandon(request);
	rgpu_request_put(request);
	return ret;

err_unlock:
	mutex_unlock(&chan->lock);
err_put:
	rgpu_request_put(request);
err_unpin:
	rgpu_region_unpin(chan, region);
	return ret;
}

/**
 * rgpu_channel_unregister - undo rgpu_channel_register()
 * @chan: a connected channel
 * @id: the region's number
 *
 * Return: 0 or an errno.
 */
int rgpu_channel_unregister(struct rgpu_channel *chan, u32 id)
{
	struct rgpu_request *request;
	struct rgpu_region *region;
	int ret;

	request = rgpu_request_alloc(chan, VIRTIO_RGPU_UNREGISTER_MEMORY, NULL);
	if (IS_ERR(request))
		return PTR_ERR(request);
	request->finish = rgpu_unregister_finish;
	request->req.region = cpu_to_le32(id);

	ret = -EINTR;
	if (mutex_lock_killable(&chan->lock))
		goto err_put;
	ret = rgpu_channel_check_connected(chan);
	if (ret)
		goto err_unlock;
	ret = -ENOENT;
	region = xa_load(&chan->regions, id);
	if (!region)
		goto err_unlock;
	ret = -EBUSY;
	if (!region->live)
		goto err_unlock;
	region->live = false;
	request->region = region;
	chan->ops++;
	rgpu_request_submit(request);
	mutex_unlock(&chan->lock);
	return rgpu_region_reply(request);

err_unlock:
	mutex_unlock(&chan->lock);
err_put:
	rgpu_request_put(request);
	return ret;
}

/**
 * rgpu_channel_close - close a channel that is no longer used
 * @chan: a channel to which the caller holds a reference
 *
 * Does not wait.
 *
 * Return: whether rgpu_channel.closed will be set soon.
 */
bool rgpu_channel_close(struct rgpu_channel *chan)
{
	bool closing;

	mutex_lock(&chan->lock);
	chan->closing = true;
	rgpu_channel_settle(chan);
	closing = chan->state >= RGPU_CHANNEL_CLOSING && !chan->closed;
	mutex_unlock(&chan->lock);
	return closing;
}

/**
 * rgpu_channels_lost - end all channels of a device that has been reset
 * @dev: a stopped device with no request in flight
 */
void rgpu_channels_lost(struct rgpu_device *dev)
{
	struct rgpu_channel *chan;
	unsigned long index = 0;

	for (;;) {
		xa_lock_irq(&dev->channels);
		chan = xa_find(&dev->channels, &index, ULONG_MAX, XA_PRESENT);
		if (chan)
			rgpu_channel_get(chan);
		xa_unlock_irq(&dev->channels);
		if (!chan)
			return;

		mutex_lock(&chan->lock);
		chan->released = true;
		rgpu_channel_settle(chan);
		mutex_unlock(&chan->lock);
		rgpu_channel_put(chan);
		index++;
	}
}
