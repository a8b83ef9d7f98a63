// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/rgpuN: the user API of include/uapi/linux/virtio_rgpu.h.
 *
 * All arguments from programs are checked here or, if the check needs a lock,
 * in channel.c.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>

#include <linux/virtio_rgpu.h>

#include "rgpu.h"

static int rgpu_open(struct inode *inode, struct file *file)
{
	/* misc_open() blocks misc_deregister(), and therefore remove. */
	struct rgpu_device *dev = container_of(file->private_data, struct rgpu_device, misc);
	struct rgpu_channel *chan = rgpu_channel_alloc(dev);

	if (!chan)
		return -ENOMEM;
	file->private_data = chan;
	return nonseekable_open(inode, file);
}

/*
 * Closes the channel when its owner exits. Otherwise a forked child that
 * inherited the file would keep the channel and its session on a server.
 */
static int rgpu_flush(struct file *file, fl_owner_t id)
{
	struct rgpu_channel *chan = file->private_data;

	if ((current->flags & PF_EXITING) && !atomic_read(&current->signal->live) &&
	    READ_ONCE(chan->owner) == task_tgid(current))
		rgpu_channel_close(chan);
	return 0;
}

static int rgpu_release(struct inode *inode, struct file *file)
{
	struct rgpu_channel *chan = file->private_data;

	/*
	 * The device normally replies immediately. Waiting for it ensures that
	 * memory is unpinned and uncharged when the program opens the file again.
	 * Nobody else waits: files that were sent to a socket may be released by
	 * a kernel thread, or by any process that closes a socket.
	 */
	if (rgpu_channel_close(chan) && chan->mm == current->mm &&
	    !(current->flags & PF_EXITING))
		rgpu_wait_event(chan->wait, smp_load_acquire(&chan->closed), RGPU_CLOSE_TIMEOUT);
	rgpu_channel_put(chan);
	return 0;
}

static int rgpu_ioctl_get_info(struct rgpu_channel *chan, void __user *arg)
{
	const struct rgpu_device *dev = chan->dev;
	struct rgpu_info info = {
		.abi_version = RGPU_ABI_VERSION,
		.device_version = dev->version,
		.max_channels = dev->max_channels,
		.max_channel_size = dev->max_channel_size,
		.max_registered = dev->max_registered,
	};

	return copy_to_user(arg, &info, sizeof(info)) ? -EFAULT : 0;
}

static int rgpu_ioctl_create_channel(struct rgpu_channel *chan, void __user *arg)
{
	struct rgpu_create_channel create;

	if (copy_from_user(&create, arg, sizeof(create)))
		return -EFAULT;
	if (create.flags)
		return -EINVAL;
	return rgpu_channel_create(chan, create.size);
}

static int rgpu_ioctl_connect(struct rgpu_channel *chan, void __user *arg)
{
	struct rgpu_connect connect = {};
	struct rgpu_request *request;
	int ret;

	/* Do not open a session whose result could not be reported. */
	if (clear_user(arg, sizeof(connect)))
		return -EFAULT;

	request = rgpu_channel_connect(chan);
	if (request == ERR_PTR(-EBUSY)) {
		connect.status = RGPU_STATUS_NO_RESOURCES;
		scnprintf(connect.reason, sizeof(connect.reason),
			  "all %u channels of %s are in use", chan->dev->max_channels,
			  chan->dev->name);
		goto reply;
	}
	if (request == ERR_PTR(-EUSERS)) {
		connect.status = RGPU_STATUS_NO_RESOURCES;
		scnprintf(connect.reason, sizeof(connect.reason),
			  "this user has as many channels of %s as one user may have, %u (parameter user_channels of the module virtio_rgpu)",
			  chan->dev->name, rgpu_user_channel_limit(chan->dev));
		goto reply;
	}
	if (IS_ERR(request))
		return PTR_ERR(request);

	ret = rgpu_request_wait(request);
	if (!ret) {
		connect.status = request->status;
		if (connect.status == RGPU_STATUS_OK)
			connect.channel = le32_to_cpu(request->req.channel);
		else
			memcpy(connect.reason, request->reason, sizeof(connect.reason));
	}
	rgpu_request_put(request);
	if (ret)
		return ret;
reply:
	return copy_to_user(arg, &connect, sizeof(connect)) ? -EFAULT : 0;
}

static int rgpu_ioctl_kick(struct rgpu_channel *chan)
{
	switch (rgpu_channel_state(chan)) {
	case RGPU_CHANNEL_CONNECTED:
		return rgpu_doorbell(chan->dev);
	case RGPU_CHANNEL_NEW:
	case RGPU_CHANNEL_CONNECTING:
		return -ENOTCONN;
	default:
		return -ENODEV;
	}
}

static int rgpu_ioctl_wait(struct rgpu_channel *chan, void __user *arg)
{
	struct rgpu_wait wait;

	if (copy_from_user(&wait, arg, sizeof(wait)))
		return -EFAULT;
	if (wait.flags)
		return -EINVAL;
	return rgpu_channel_wait(chan, wait.offset, wait.expected, wait.timeout_ns);
}

static int rgpu_ioctl_register_memory(struct rgpu_channel *chan, void __user *arg)
{
	struct rgpu_register_memory __user *user = arg;
	struct rgpu_register_memory reg;
	int ret;

	if (copy_from_user(&reg, user, sizeof(reg)))
		return -EFAULT;
	if (reg.flags & ~RGPU_REGISTER_READ_ONLY)
		return -EINVAL;
	ret = rgpu_channel_register(chan, reg.addr, reg.size,
				    reg.flags & RGPU_REGISTER_READ_ONLY, &reg.region);
	if (ret)
		return ret;
	if (put_user(reg.region, &user->region)) {
		/* The program cannot use a region without its number. */
		rgpu_channel_unregister(chan, reg.region);
		return -EFAULT;
	}
	return 0;
}

static int rgpu_ioctl_unregister_memory(struct rgpu_channel *chan, void __user *arg)
{
	struct rgpu_unregister_memory unregister;

	if (copy_from_user(&unregister, arg, sizeof(unregister)))
		return -EFAULT;
	if (unregister.reserved)
		return -EINVAL;
	return rgpu_channel_unregister(chan, unregister.region);
}

static long rgpu_ioctl(struct file *file, unsigned int cmd, unsigned long value)
{
	struct rgpu_channel *chan = file->private_data;
	void __user *arg = (void __user *)value;

	if (!READ_ONCE(chan->dev->running) || rgpu_channel_state(chan) == RGPU_CHANNEL_LOST)
		return -ENODEV;

	switch (cmd) {
	case RGPU_IOC_GET_INFO:
		return rgpu_ioctl_get_info(chan, arg);
	case RGPU_IOC_CREATE_CHANNEL:
		return rgpu_ioctl_create_channel(chan, arg);
	case RGPU_IOC_CONNECT:
	case RGPU_IOC_KICK:
	case RGPU_IOC_WAIT:
	case RGPU_IOC_REGISTER_MEMORY:
	case RGPU_IOC_UNREGISTER_MEMORY:
		break;
	default:
		return -ENOTTY;
	}

	/* A channel that has pages has an owner. */
	if (!smp_load_acquire(&chan->pages))
		return -ENXIO;
	if (chan->mm != current->mm)
		return -EPERM;

	switch (cmd) {
	case RGPU_IOC_CONNECT:
		return rgpu_ioctl_connect(chan, arg);
	case RGPU_IOC_KICK:
		return rgpu_ioctl_kick(chan);
	case RGPU_IOC_WAIT:
		return rgpu_ioctl_wait(chan, arg);
	case RGPU_IOC_REGISTER_MEMORY:
		return rgpu_ioctl_register_memory(chan, arg);
	default:
		return rgpu_ioctl_unregister_memory(chan, arg);
	}
}

static int rgpu_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct rgpu_channel *chan = file->private_data;
	unsigned long count;
	struct page **pages;

	/* A channel that has pages has a page count and an owner. */
	pages = smp_load_acquire(&chan->pages);
	if (!pages)
		return -ENXIO;
	if (chan->mm != current->mm)
		return -EPERM;
	if (vma->vm_pgoff || vma_pages(vma) != chan->page_count ||
	    !(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EINVAL;

	/* A forked child must not write to its parent's channel. */
#ifdef RGPU_HAVE_VM_FLAGS_MOD
	vm_flags_mod(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP, VM_MAYEXEC);
#else
	vma->vm_flags |= VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP;
	vma->vm_flags &= ~VM_MAYEXEC;
#endif
	count = chan->page_count;
	return vm_insert_pages(vma, vma->vm_start, pages, &count);
}

static __poll_t rgpu_poll(struct file *file, poll_table *wait)
{
	struct rgpu_channel *chan = file->private_data;
	__poll_t events = 0;

	poll_wait(file, &chan->wait, wait);
	poll_wait(file, &chan->dev->stopped, wait);
	if (READ_ONCE(chan->wake_pending))
		events |= EPOLLIN | EPOLLRDNORM;
	if (rgpu_channel_state(chan) == RGPU_CHANNEL_LOST || !READ_ONCE(chan->dev->running))
		events |= EPOLLHUP | EPOLLERR;
	return events;
}

const struct file_operations rgpu_fops = {
	.owner = THIS_MODULE,
	.open = rgpu_open,
	.flush = rgpu_flush,
	.release = rgpu_release,
	.unlocked_ioctl = rgpu_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = rgpu_mmap,
	.poll = rgpu_poll,
};
