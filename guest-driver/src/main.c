// SPDX-License-Identifier: GPL-2.0
/*
 * virtio_rgpu: the guest driver of an rgpu device.
 *
 * Binds to the virtio device, and starts and stops it. rgpu.h lists the other
 * files and describes lifetimes and locking.
 */
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/reboot.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "rgpu.h"

static DEFINE_IDA(rgpu_indices);

/* Devices whose memory is not freed yet, and who waits for that. */
static atomic_t rgpu_device_count = ATOMIC_INIT(0);
static DECLARE_WAIT_QUEUE_HEAD(rgpu_devices_gone);

struct rgpu_device *rgpu_device_get(struct rgpu_device *dev)
{
	kref_get(&dev->ref);
	return dev;
}

static void rgpu_device_release_work(struct work_struct *work)
{
	struct rgpu_device *dev = container_of(work, struct rgpu_device, release);

	destroy_workqueue(dev->unpin_workqueue);
	xa_destroy(&dev->channels);
	cleanup_srcu_struct(&dev->doorbell_srcu);
	kfree(dev);
	if (atomic_dec_and_test(&rgpu_device_count))
		wake_up_all(&rgpu_devices_gone);
}

/* May run in dev->unpin_workqueue, which cannot be destroyed there. */
static void rgpu_device_release(struct kref *ref)
{
	struct rgpu_device *dev = container_of(ref, struct rgpu_device, ref);

	queue_work(rgpu_workqueue, &dev->release);
}

void rgpu_device_put(struct rgpu_device *dev)
{
	kref_put(&dev->ref, rgpu_device_release);
}

static int rgpu_read_config(struct rgpu_device *dev)
{
	struct virtio_device *vdev = dev->vdev;

	virtio_cread_le(vdev, struct virtio_rgpu_config, version, &dev->version);
	if (dev->version != VIRTIO_RGPU_VERSION) {
		dev_err(&vdev->dev, "device has version %u, but the driver supports version %u\n",
			dev->version, VIRTIO_RGPU_VERSION);
		return -EINVAL;
	}
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_channels, &dev->max_channels);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_extents, &dev->max_extents);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_channel_size,
			&dev->max_channel_size);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_registered, &dev->max_registered);
	if (!dev->max_channels || !dev->max_extents || dev->max_channel_size < PAGE_SIZE) {
		dev_err(&vdev->dev, "unusable device: %u channels of %llu bytes, %u extents\n",
			dev->max_channels, dev->max_channel_size, dev->max_extents);
		return -EINVAL;
	}
	return 0;
}

static int rgpu_start(struct rgpu_device *dev)
{
	int ret = rgpu_read_config(dev);

	return ret ? ret : rgpu_queues_start(dev);
}

/*
 * Ends every channel. Does nothing if already stopped. Pages are unpinned later: users
 * may hold locks of them, and could keep the machine from a suspend or a reboot.
 */
static void rgpu_stop(struct rgpu_device *dev)
{
	if (!rgpu_queues_stop(dev))
		return;
	rgpu_channels_lost(dev);
	/* Wait for replies that the above has queued. */
	flush_workqueue(rgpu_workqueue);
	wake_up_all(&dev->stopped);
}

/*
 * Called before a reboot or kexec, so that the device does not access the next
 * kernel's memory. Older kernels do not shut down virtio drivers themselves.
 */
static int rgpu_reboot(struct notifier_block *notifier, unsigned long action, void *data)
{
	rgpu_stop(container_of(notifier, struct rgpu_device, reboot));
	return NOTIFY_DONE;
}

static bool rgpu_is_rgpu(struct virtio_device *vdev)
{
	u32 magic;

	virtio_cread_le(vdev, struct virtio_rgpu_config, magic, &magic);
	return magic == VIRTIO_RGPU_MAGIC;
}

static int rgpu_validate(struct virtio_device *vdev)
{
	/* Stay silent about other devices with the same type. */
	if (!vdev->config->get || !rgpu_is_rgpu(vdev))
		return -ENODEV;
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "device does not offer VIRTIO_F_VERSION_1\n");
		return -EINVAL;
	}
	/* Extents are guest-physical addresses, which such a device cannot use. */
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev, "device requires VIRTIO_F_ACCESS_PLATFORM (iommu_platform=on), which is not supported\n");
		return -EINVAL;
	}
	return 0;
}

static int rgpu_probe(struct virtio_device *vdev)
{
	struct rgpu_device *dev;
	int ret;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return -ENOMEM;
	/* A user can keep an item of it for each channel, which must not hinder other devices. */
	dev->unpin_workqueue = alloc_workqueue("virtio_rgpu_unpin", WQ_UNBOUND, WQ_MAX_ACTIVE);
	if (!dev->unpin_workqueue) {
		ret = -ENOMEM;
		goto err_free;
	}
	ret = init_srcu_struct(&dev->doorbell_srcu);
	if (ret)
		goto err_workqueue;
	atomic_inc(&rgpu_device_count);
	kref_init(&dev->ref);
	INIT_WORK(&dev->release, rgpu_device_release_work);
	xa_init_flags(&dev->channels, XA_FLAGS_ALLOC | XA_FLAGS_LOCK_IRQ);
	init_waitqueue_head(&dev->id_freed);
	init_waitqueue_head(&dev->stopped);
	spin_lock_init(&dev->ctrl_lock);
	spin_lock_init(&dev->event_lock);
	spin_lock_init(&dev->users_lock);
	INIT_LIST_HEAD(&dev->users);
	INIT_LIST_HEAD(&dev->in_flight);
	INIT_LIST_HEAD(&dev->destroys);
	INIT_LIST_HEAD(&dev->turns);
	dev->vdev = vdev;
	vdev->priv = dev;

	dev->index = ida_alloc(&rgpu_indices, GFP_KERNEL);
	if (dev->index < 0) {
		ret = dev->index;
		goto err_put;
	}
	snprintf(dev->name, sizeof(dev->name), "rgpu%d", dev->index);

	ret = rgpu_start(dev);
	if (ret)
		goto err_index;

	dev->misc = (struct miscdevice) {
		.minor = MISC_DYNAMIC_MINOR,
		.name = dev->name,
		.fops = &rgpu_fops,
		.parent = &vdev->dev,
		/* The device isolates programs, and user.c limits what each user has of it. */
		.mode = 0666,
	};
	ret = misc_register(&dev->misc);
	if (ret)
		goto err_stop;
	dev->reboot.notifier_call = rgpu_reboot;
	register_reboot_notifier(&dev->reboot);
	dev_info(&vdev->dev, "/dev/%s: up to %u channels of %llu KiB\n", dev->name,
		 dev->max_channels, dev->max_channel_size >> 10);
	return 0;

err_stop:
	rgpu_stop(dev);
err_index:
	ida_free(&rgpu_indices, dev->index);
err_put:
	vdev->priv = NULL;
	rgpu_device_put(dev);
	return ret;

err_workqueue:
	destroy_workqueue(dev->unpin_workqueue);
err_free:
	kfree(dev);
	return ret;
}

static void rgpu_remove(struct virtio_device *vdev)
{
	struct rgpu_device *dev = vdev->priv;

	unregister_reboot_notifier(&dev->reboot);
	misc_deregister(&dev->misc);
	rgpu_stop(dev);
	ida_free(&rgpu_indices, dev->index);
	vdev->priv = NULL;
	rgpu_device_put(dev);
}

static int __maybe_unused rgpu_suspend(struct virtio_device *vdev)
{
	rgpu_stop(vdev->priv);
	return 0;
}

static int __maybe_unused rgpu_resume(struct virtio_device *vdev)
{
	return rgpu_start(vdev->priv);
}

static const struct virtio_device_id rgpu_ids[] = {
	{ VIRTIO_ID_RGPU, VIRTIO_DEV_ANY_ID },
	{},
};
MODULE_DEVICE_TABLE(virtio, rgpu_ids);

static struct virtio_driver rgpu_driver = {
	.driver.name = KBUILD_MODNAME,
	.id_table = rgpu_ids,
	.validate = rgpu_validate,
	.probe = rgpu_probe,
	.remove = rgpu_remove,
#ifdef CONFIG_PM_SLEEP
	.freeze = rgpu_suspend,
	.restore = rgpu_resume,
#endif
#ifdef RGPU_HAVE_RESET
	.reset_prepare = rgpu_suspend,
	.reset_done = rgpu_resume,
#endif
};

struct workqueue_struct *rgpu_workqueue;

static int __init rgpu_init(void)
{
	int ret;

	rgpu_workqueue = alloc_workqueue("virtio_rgpu", WQ_UNBOUND, WQ_MAX_ACTIVE);
	if (!rgpu_workqueue)
		return -ENOMEM;
	ret = register_virtio_driver(&rgpu_driver);
	if (ret)
		destroy_workqueue(rgpu_workqueue);
	return ret;
}
module_init(rgpu_init);

static void __exit rgpu_exit(void)
{
	unregister_virtio_driver(&rgpu_driver);
	/* For pages whose locks somebody still holds. */
	wait_event(rgpu_devices_gone, !atomic_read(&rgpu_device_count));
	/* Waits for the work that has freed the last device. */
	destroy_workqueue(rgpu_workqueue);
	ida_destroy(&rgpu_indices);
}
module_exit(rgpu_exit);

MODULE_DESCRIPTION("Guest driver of the rgpu virtio device");
MODULE_AUTHOR("The rgpu authors");
MODULE_LICENSE("GPL");
