// SPDX-License-Identifier: GPL-2.0
/*
 * The virtqueues: requests and replies, events, the doorbell.
 *
 * A request that does not fit into the control queue waits in a list until
 * replies make room, so submitting neither blocks nor fails. A user gets a part
 * of the queue, so that requests which the device does not answer for long leave
 * room for those of other users; DESTROY_CHANNEL is not counted and goes first.
 * A work item passes errors to the request's finish(), just like replies.
 */
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "rgpu.h"

/* Longer than the device takes to give up on reaching a server. */
#define RGPU_REPLY_TIMEOUT	(30 * HZ)

/**
 * rgpu_replies_work - finish a channel's requests that need nothing more of the device
 * @work: rgpu_channel.replies
 *
 * Never waits for a user, as stopping a device waits for this.
 */
void rgpu_replies_work(struct work_struct *work)
{
	struct rgpu_channel *chan = container_of(work, struct rgpu_channel, replies);
	struct rgpu_device *dev = chan->dev;
	struct rgpu_request *request;

	for (;;) {
		spin_lock_irq(&dev->ctrl_lock);
		request = list_first_entry_or_null(&chan->finished, struct rgpu_request, node);
		if (request)
			list_del_init(&request->node);
		spin_unlock_irq(&dev->ctrl_lock);
		if (!request)
			break;
		request->finish(request);
		/* Whoever sees this also sees what finish() has done. */
		smp_store_release(&request->done, true);
		wake_up_all(&request->wait);
		rgpu_request_put(request);
		rgpu_channel_put(chan);
	}
	rgpu_channel_put(chan);
}

static void rgpu_request_release(struct kref *ref)
{
	kfree(container_of(ref, struct rgpu_request, ref));
}

void rgpu_request_put(struct rgpu_request *request)
{
	kref_put(&request->ref, rgpu_request_release);
}

/**
 * rgpu_request_alloc - allocate a request about a channel
 * @chan: the channel; its id is read when the request is submitted
 * @type: enum virtio_rgpu_ctrl_type
 * @extents: extents of the request or NULL; must stay valid until the request is
 *	finished
 *
 * The caller fills in the rest of the request and must set finish before
 * submitting it.
 *
 * Return: the request or an ERR_PTR().
 */
struct rgpu_request *rgpu_request_alloc(struct rgpu_channel *chan, u32 type,
					const struct rgpu_extents *extents)
{
	unsigned int chunks = extents ? extents->chunk_count : 0;
	struct rgpu_request *request;

	if (chunks + 2 > chan->dev->max_descriptors)
		return ERR_PTR(-E2BIG);
	if (extents && extents->count > chan->dev->max_extents)
		return ERR_PTR(-E2BIG);
	request = kzalloc(struct_size(request, sg, chunks + 2), GFP_KERNEL);
	if (!request)
		return ERR_PTR(-ENOMEM);

	kref_init(&request->ref);
	INIT_LIST_HEAD(&request->node);
	init_waitqueue_head(&request->wait);
	request->chan = chan;
	request->req.type = cpu_to_le32(type);
	if (extents) {
		request->req.extent_count = cpu_to_le32(extents->count);
		request->req.size = cpu_to_le64(extents->bytes);
	}

	request->out_count = chunks + 1;
	sg_init_table(request->sg, request->out_count);
	sg_set_buf(&request->sg[0], &request->req, sizeof(request->req));
	if (extents)
		rgpu_extents_to_sg(extents, &request->sg[1]);
	sg_init_one(&request->sg[request->out_count], &request->resp, sizeof(request->resp));
	return request;
}

/* The device has done with a request, or will not get it. Needs ctrl_lock. */
static void rgpu_request_finish(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;

	list_move_tail(&request->node, &chan->finished);
	if (queue_work(rgpu_workqueue, &chan->replies))
		rgpu_channel_get(chan);
}

static void rgpu_request_fail(struct rgpu_request *request, int error)
{
	request->error = error;
	rgpu_request_finish(request);
}

/* A channel's destroy is set once, before the first request for it. */
static bool rgpu_request_is_destroy(const struct rgpu_request *request)
{
	return request == request->chan->destroy;
}

/*
 * Adds the user to dev->turns if it may send another request, else removes it.
 * Needs ctrl_lock.
 */
static void rgpu_user_turn(struct rgpu_device *dev, struct rgpu_user *user)
{
	unsigned int share = max(dev->max_descriptors / 4, 1U);

	if (list_empty(&user->waiting) || user->in_flight >= share)
		list_del_init(&user->turn);
	else if (list_empty(&user->turn))
		list_add_tail(&user->turn, &dev->turns);
}

/* The request that is next, if any may be sent. Needs ctrl_lock. */
static struct rgpu_request *rgpu_ctrl_next(struct rgpu_device *dev)
{
	struct rgpu_user *user = list_first_entry_or_null(&dev->turns, struct rgpu_user, turn);

	if (!list_empty(&dev->destroys))
		return list_first_entry(&dev->destroys, struct rgpu_request, node);
	return user ? list_first_entry(&user->waiting, struct rgpu_request, node) : NULL;
}

/* Passes waiting requests to the device as far as they fit. Needs ctrl_lock. */
static void rgpu_ctrl_pump(struct rgpu_device *dev)
{
	struct rgpu_request *request;
	bool added = false;

	while ((request = rgpu_ctrl_next(dev))) {
		struct rgpu_user *user = rgpu_request_is_destroy(request) ? NULL :
									    request->chan->user;
		struct scatterlist *sgs[] = { request->sg, &request->sg[request->out_count] };
		int ret = virtqueue_add_sgs(dev->controlq, sgs, 1, 1, request, GFP_ATOMIC);

		/* The next reply makes room and calls this again. */
		if (ret && !list_empty(&dev->in_flight) && !virtqueue_is_broken(dev->controlq))
			break;
		if (ret)
			rgpu_request_fail(request, -ENODEV);
		else
			list_move_tail(&request->node, &dev->in_flight);
		if (user) {
			user->in_flight += !ret;
			/* The next one is another user's. */
			list_del_init(&user->turn);
			rgpu_user_turn(dev, user);
		}
		added |= !ret;
	}
	if (added)
		virtqueue_kick(dev->controlq);
}

/**
 * rgpu_request_submit - pass a request to the device
 * @request: a request with finish set, for a channel with an id
 *
 * Takes a reference to the request and one to the channel. Must be called in
 * process context, without the queues' locks. A work item finishes the request
 * in any case.
 *
 * While the device is being stopped, requests wait for its reset: until then it
 * may access memory that -ENODEV would release.
 */
void rgpu_request_submit(struct rgpu_request *request)
{
	struct rgpu_device *dev = request->chan->dev;
	struct rgpu_user *user = request->chan->user;
	unsigned long flags;

	kref_get(&request->ref);
	rgpu_channel_get(request->chan);
	request->req.channel = cpu_to_le32(request->chan->id);

	spin_lock_irqsave(&dev->ctrl_lock, flags);
	if (dev->controlq) {
		if (rgpu_request_is_destroy(request)) {
			list_add_tail(&request->node, &dev->destroys);
		} else {
			list_add_tail(&request->node, &user->waiting);
			rgpu_user_turn(dev, user);
		}
		if (dev->running)
			rgpu_ctrl_pump(dev);
	} else {
		rgpu_request_fail(request, -ENODEV);
	}
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
}

/**
 * rgpu_request_wait - wait until a request is finished
 * @request: a submitted request to which the caller holds a reference, of a channel
 *	likewise
 *
 * A region that the request has removed is unpinned then.
 *
 * If the host side is killed, its device never replies and the hypervisor does
 * not report it. The timeout keeps programs from hanging. The caller must not hold a
 * lock: the machine can be suspended meanwhile, which ends the request.
 *
 * Return: 0 if the device replied; -EINTR on a fatal signal and -ETIMEDOUT if the
 * device takes too long (the request continues in both cases); otherwise
 * rgpu_request.error.
 */
int rgpu_request_wait(struct rgpu_request *request)
{
	struct rgpu_channel *chan = request->chan;
	long left = rgpu_wait_event(request->wait, smp_load_acquire(&request->done),
				    RGPU_REPLY_TIMEOUT);

	if (left > 0)
		left = rgpu_wait_event(chan->unpin_wait,
				       rgpu_channel_unpinned(chan, request->unpin), left);
	if (left < 0)
		return -EINTR;
	return left ? request->error : -ETIMEDOUT;
}

static void rgpu_ctrl_done(struct virtqueue *vq)
{
	struct rgpu_device *dev = vq->vdev->priv;
	struct rgpu_request *request;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&dev->ctrl_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((request = virtqueue_get_buf(vq, &len))) {
			if (!rgpu_request_is_destroy(request)) {
				request->chan->user->in_flight--;
				rgpu_user_turn(dev, request->chan->user);
			}
			if (len < offsetofend(struct virtio_rgpu_ctrl_resp, status))
				request->error = -EIO;
			request->status = le32_to_cpu(READ_ONCE(request->resp.status));
			memcpy(request->reason, request->resp.reason, sizeof(request->reason) - 1);
			rgpu_request_finish(request);
		}
	} while (!virtqueue_enable_cb(vq));
	if (dev->running)
		rgpu_ctrl_pump(dev);
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
}

static int rgpu_event_post(struct rgpu_device *dev, struct virtio_rgpu_event *event)
{
	struct scatterlist sg;

	sg_init_one(&sg, event, sizeof(*event));
	return virtqueue_add_inbuf(dev->eventq, &sg, 1, event, GFP_ATOMIC);
}

static void rgpu_event_handle(struct rgpu_device *dev, const struct virtio_rgpu_event *event)
{
	struct rgpu_channel *chan;
	unsigned long flags;

	if (le32_to_cpu(READ_ONCE(event->type)) != VIRTIO_RGPU_EVENT_WAKE)
		return;
	/* The table holds a reference as long as the entry exists. */
	xa_lock_irqsave(&dev->channels, flags);
	chan = xa_load(&dev->channels, le32_to_cpu(READ_ONCE(event->channel)));
	if (chan)
		rgpu_channel_wake(chan);
	xa_unlock_irqrestore(&dev->channels, flags);
}

static void rgpu_event_done(struct virtqueue *vq)
{
	struct rgpu_device *dev = vq->vdev->priv;
	struct virtio_rgpu_event *event;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&dev->event_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((event = virtqueue_get_buf(vq, &len))) {
			if (len >= sizeof(*event))
				rgpu_event_handle(dev, event);
			/* Cannot fail: a buffer was just removed. */
			rgpu_event_post(dev, event);
		}
	} while (!virtqueue_enable_cb(vq));
	virtqueue_kick(vq);
	spin_unlock_irqrestore(&dev->event_lock, flags);
}

static int rgpu_find_vqs(struct virtio_device *vdev, struct virtqueue *vqs[])
{
#ifdef RGPU_HAVE_VIRTQUEUE_INFO
	struct virtqueue_info info[VIRTIO_RGPU_VQ_COUNT] = {
		[VIRTIO_RGPU_VQ_CONTROL] = { "control", rgpu_ctrl_done },
		[VIRTIO_RGPU_VQ_DOORBELL] = { "doorbell", NULL },
		[VIRTIO_RGPU_VQ_EVENT] = { "event", rgpu_event_done },
	};

	return virtio_find_vqs(vdev, VIRTIO_RGPU_VQ_COUNT, vqs, info, NULL);
#else
	vq_callback_t *callbacks[VIRTIO_RGPU_VQ_COUNT] = {
		[VIRTIO_RGPU_VQ_CONTROL] = rgpu_ctrl_done,
		[VIRTIO_RGPU_VQ_EVENT] = rgpu_event_done,
	};
	static const char * const names[VIRTIO_RGPU_VQ_COUNT] = {
		[VIRTIO_RGPU_VQ_CONTROL] = "control",
		[VIRTIO_RGPU_VQ_DOORBELL] = "doorbell",
		[VIRTIO_RGPU_VQ_EVENT] = "event",
	};

	return virtio_find_vqs(vdev, VIRTIO_RGPU_VQ_COUNT, vqs, callbacks, names, NULL);
#endif
}

/**
 * rgpu_queues_start - set up the virtqueues and accept requests
 * @dev: a stopped device whose virtio device has negotiated features
 *
 * Return: 0, or an errno with the device still stopped.
 */
int rgpu_queues_start(struct rgpu_device *dev)
{
	struct virtqueue *vqs[VIRTIO_RGPU_VQ_COUNT];
	unsigned int i, count;
	unsigned long flags;
	int ret;

	ret = rgpu_find_vqs(dev->vdev, vqs);
	if (ret)
		return ret;

	/* An interrupt may arrive as soon as the device is ready. */
	spin_lock_irqsave(&dev->event_lock, flags);
	dev->eventq = vqs[VIRTIO_RGPU_VQ_EVENT];
	count = min_t(unsigned int, RGPU_EVENT_BUFFERS, dev->eventq->num_free);
	for (i = 0; i < count && !ret; i++)
		ret = rgpu_event_post(dev, &dev->events[i]);
	spin_unlock_irqrestore(&dev->event_lock, flags);
	if (ret) {
		dev->eventq = NULL;
		dev->vdev->config->del_vqs(dev->vdev);
		return ret;
	}

	dev->max_descriptors = virtqueue_get_vring_size(vqs[VIRTIO_RGPU_VQ_CONTROL]);
	virtio_device_ready(dev->vdev);
	spin_lock_irqsave(&dev->event_lock, flags);
	virtqueue_kick(dev->eventq);
	spin_unlock_irqrestore(&dev->event_lock, flags);

	spin_lock_irqsave(&dev->ctrl_lock, flags);
	dev->controlq = vqs[VIRTIO_RGPU_VQ_CONTROL];
	WRITE_ONCE(dev->running, true);
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
	WRITE_ONCE(dev->doorbellq, vqs[VIRTIO_RGPU_VQ_DOORBELL]);
	return 0;
}

/**
 * rgpu_queues_stop - reset the device and finish pending requests
 * @dev: the device
 *
 * Afterwards the device accesses no memory, new requests fail with -ENODEV, and
 * all requests that were in flight are finished.
 *
 * Return: false if it was already stopped.
 */
bool rgpu_queues_stop(struct rgpu_device *dev)
{
	struct rgpu_request *request, *next;
	struct rgpu_user *user;
	unsigned long flags;
	bool running;
	LIST_HEAD(pending);

	spin_lock_irqsave(&dev->ctrl_lock, flags);
	running = dev->running;
	WRITE_ONCE(dev->running, false);
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
	if (!running)
		return false;
	WRITE_ONCE(dev->doorbellq, NULL);
	synchronize_srcu(&dev->doorbell_srcu);

	virtio_reset_device(dev->vdev);

	spin_lock(&dev->users_lock);
	spin_lock_irqsave(&dev->ctrl_lock, flags);
	dev->controlq = NULL;
	list_splice_init(&dev->in_flight, &pending);
	list_splice_tail_init(&dev->destroys, &pending);
	list_for_each_entry(user, &dev->users, node) {
		list_splice_tail_init(&user->waiting, &pending);
		list_del_init(&user->turn);
		user->in_flight = 0;
	}
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
	spin_unlock(&dev->users_lock);
	dev->eventq = NULL;
	dev->vdev->config->del_vqs(dev->vdev);

	spin_lock_irqsave(&dev->ctrl_lock, flags);
	list_for_each_entry_safe(request, next, &pending, node)
		rgpu_request_fail(request, -ENODEV);
	spin_unlock_irqrestore(&dev->ctrl_lock, flags);
	/* Those of all devices, but none waits for a user. */
	flush_workqueue(rgpu_workqueue);
	return true;
}

/**
 * rgpu_doorbell - notify the device that a channel has work
 * @dev: the device
 *
 * Return: 0 or -ENODEV.
 */
int rgpu_doorbell(struct rgpu_device *dev)
{
	struct virtqueue *vq;
	int ret = -ENODEV;
	int idx;

	idx = srcu_read_lock(&dev->doorbell_srcu);
	vq = READ_ONCE(dev->doorbellq);
	if (vq && virtqueue_notify(vq))
		ret = 0;
	srcu_read_unlock(&dev->doorbell_srcu, idx);
	return ret;
}
