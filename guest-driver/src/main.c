// SPDX-License-Identifier: GPL-2.0
/*
 * virtio_rgpu: the guest's side of an rgpu device.
 *
 * Binds to the virtio device, if it is one, and starts and stops it. rgpu.h
 * says what the other files are for and who keeps whom alive.
 */
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/reboot.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "rgpu.h"

static DEFINE_IDA(rgpu_indices);

struct rgpu_device *rgpu_device_get(struct rgpu_device *dev)
{
	kref_get(&dev->ref);
	return dev;
}

static void rgpu_device_release(struct kref *ref)
{
	struct rgpu_device *dev = container_of(ref, struct rgpu_device, ref);

	xa_destroy(&dev->channels);
	cleanup_srcu_struct(&dev->doorbell_srcu);
	kfree(dev);
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
		dev_err(&vdev->dev, "device speaks version %u of the rgpu device, driver version %u\n",
			dev->version, VIRTIO_RGPU_VERSION);
		return -EINVAL;
	}
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_channels, &dev->max_channels);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_extents, &dev->max_extents);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_channel_size,
			&dev->max_channel_size);
	virtio_cread_le(vdev, struct virtio_rgpu_config, max_registered, &dev->max_registered);
	if (!dev->max_channels || !dev->max_extents || dev->max_channel_size < PAGE_SIZE) {
		dev_err(&vdev->dev, "device takes %u channels of %llu bytes and %u extents: of no use\n",
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

/* Afterwards every channel is lost and no page pinned. Stopping twice is fine. */
static void rgpu_stop(struct rgpu_device *dev)
{
	if (!rgpu_queues_stop(dev))
		return;
	rgpu_channels_lost(dev);
	/* For the work that the above brought about. */
	flush_workqueue(rgpu_workqueue);
	wake_up_all(&dev->stopped);
}

/*
 * Before a reboot or a kexec: the next kernel must not find the device at work
 * in its memory. Not every kernel that this builds for asks virtio drivers.
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
	/* Another device of this type is not this driver's to complain about. */
	if (!vdev->config->get || !rgpu_is_rgpu(vdev))
		return -ENODEV;
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "device does not offer VIRTIO_F_VERSION_1\n");
		return -EINVAL;
	}
	/*
	 * Extents are guest-physical addresses, which is not what such a
	 * device can use.
	 */
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev, "device wants VIRTIO_F_ACCESS_PLATFORM (iommu_platform=on), which is not supported\n");
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
	ret = init_srcu_struct(&dev->doorbell_srcu);
	if (ret) {
		kfree(dev);
		return ret;
	}
	kref_init(&dev->ref);
	xa_init_flags(&dev->channels, XA_FLAGS_ALLOC | XA_FLAGS_LOCK_IRQ);
	init_waitqueue_head(&dev->id_freed);
	init_waitqueue_head(&dev->stopped);
	spin_lock_init(&dev->ctrl_lock);
	spin_lock_init(&dev->event_lock);
	INIT_LIST_HEAD(&dev->in_flight);
	INIT_LIST_HEAD(&dev->waiting);
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
		/* The device itself tells programs apart and bounds them. */
		.mode = 0666,
	};
	ret = misc_register(&dev->misc);
	if (ret)
		goto err_stop;
	dev->reboot.notifier_call = rgpu_reboot;
	register_reboot_notifier(&dev->reboot);
	dev_info(&vdev->dev, "/dev/%s: at most %u channels of %llu KiB\n", dev->name,
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

	rgpu_workqueue = alloc_workqueue("virtio_rgpu", WQ_UNBOUND, 0);
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
	destroy_workqueue(rgpu_workqueue);
	ida_destroy(&rgpu_indices);
}
module_exit(rgpu_exit);

MODULE_DESCRIPTION("Guest driver of the rgpu virtio device");
MODULE_AUTHOR("The rgpu authors");
MODULE_LICENSE("GPL");
