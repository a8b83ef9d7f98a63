// SPDX-License-Identifier: GPL-2.0
/*
 * What one user of the guest may have of a device.
 *
 * Any program may open the device, so that without limits one user could take
 * all channels, or fill the guest with memory that cannot be swapped out.
 * RLIMIT_MEMLOCK does not help: it is per process, and channels do not count.
 * Programs with CAP_SYS_RESOURCE may go beyond the limits.
 */
#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "rgpu.h"

static unsigned int user_channels;
module_param(user_channels, uint, 0644);
MODULE_PARM_DESC(user_channels, "maximum number of channels of one user on a device (default 0: half of the device's)");

static unsigned long user_memory_mib;
module_param(user_memory_mib, ulong, 0644);
MODULE_PARM_DESC(user_memory_mib, "maximum size in MiB of one user's channels and registered memory on a device (default 0: half of the guest's memory)");

/**
 * rgpu_user_channel_limit - maximum number of connected channels of one user
 * @dev: the device
 */
u32 rgpu_user_channel_limit(const struct rgpu_device *dev)
{
	return READ_ONCE(user_channels) ?: DIV_ROUND_UP(dev->max_channels, 2);
}

static unsigned long rgpu_user_page_limit(void)
{
	unsigned long mib = READ_ONCE(user_memory_mib);

	if (!mib)
		return totalram_pages() / 2;
	return min(mib, ULONG_MAX / SZ_1M) * (SZ_1M / PAGE_SIZE);
}

static struct rgpu_user *rgpu_user_find(struct rgpu_device *dev, kuid_t uid)
{
	struct rgpu_user *user;

	list_for_each_entry(user, &dev->users, node)
		if (uid_eq(user->uid, uid))
			return user;
	return NULL;
}

/**
 * rgpu_user_get - get the calling user of a device
 * @dev: the device, which must outlive the reference
 *
 * Return: the user, for rgpu_user_put(), or NULL without memory.
 */
struct rgpu_user *rgpu_user_get(struct rgpu_device *dev)
{
	struct rgpu_user *new = kzalloc(sizeof(*new), GFP_KERNEL_ACCOUNT);
	struct rgpu_user *user;

	if (!new)
		return NULL;
	new->dev = dev;
	new->uid = current_uid();
	INIT_LIST_HEAD(&new->turn);
	INIT_LIST_HEAD(&new->waiting);

	spin_lock(&dev->users_lock);
	user = rgpu_user_find(dev, new->uid);
	if (!user) {
		user = new;
		new = NULL;
		list_add(&user->node, &dev->users);
	}
	user->refs++;
	spin_unlock(&dev->users_lock);
	kfree(new);
	return user;
}

/* Does nothing for NULL. */
void rgpu_user_put(struct rgpu_user *user)
{
	struct rgpu_device *dev;
	bool last;

	if (!user)
		return;
	dev = user->dev;
	spin_lock(&dev->users_lock);
	last = !--user->refs;
	if (last)
		list_del(&user->node);
	spin_unlock(&dev->users_lock);
	if (last)
		kfree(user);
}

/* Adds to a user's counts unless that exceeds a limit which is not ignored. */
static bool rgpu_user_try_charge(struct rgpu_user *user, u32 channels, unsigned long pages,
				 bool ignore_limits)
{
	struct rgpu_device *dev = user->dev;
	u32 channel_limit = rgpu_user_channel_limit(dev);
	unsigned long page_limit = rgpu_user_page_limit();
	bool fits;

	spin_lock(&dev->users_lock);
	fits = ignore_limits ||
	       ((!channels || user->channels < channel_limit) &&
		(!pages || (pages <= page_limit && user->pages <= page_limit - pages)));
	if (fits) {
		user->channels += channels;
		user->pages += pages;
	}
	spin_unlock(&dev->users_lock);
	return fits;
}

static bool rgpu_user_charge(struct rgpu_user *user, u32 channels, unsigned long pages)
{
	return rgpu_user_try_charge(user, channels, pages, false) ||
	       (capable(CAP_SYS_RESOURCE) && rgpu_user_try_charge(user, channels, pages, true));
}

static void rgpu_user_uncharge(struct rgpu_user *user, u32 channels, unsigned long pages)
{
	spin_lock(&user->dev->users_lock);
	user->channels -= channels;
	user->pages -= pages;
	spin_unlock(&user->dev->users_lock);
}

/**
 * rgpu_user_charge_channel - count a channel that connects
 * @user: its owner
 *
 * Return: 0, or -EUSERS if the owner has as many channels as a user may have.
 */
int rgpu_user_charge_channel(struct rgpu_user *user)
{
	return rgpu_user_charge(user, 1, 0) ? 0 : -EUSERS;
}

/* Undoes rgpu_user_charge_channel(). */
void rgpu_user_uncharge_channel(struct rgpu_user *user)
{
	rgpu_user_uncharge(user, 1, 0);
}

/**
 * rgpu_user_charge_pages - count memory that cannot be swapped out
 * @user: its owner
 * @pages: number of pages
 *
 * Return: 0, or -EDQUOT if that is more than a user may have.
 */
int rgpu_user_charge_pages(struct rgpu_user *user, unsigned long pages)
{
	return rgpu_user_charge(user, 0, pages) ? 0 : -EDQUOT;
}

/* Undoes rgpu_user_charge_pages(). */
void rgpu_user_uncharge_pages(struct rgpu_user *user, unsigned long pages)
{
	rgpu_user_uncharge(user, 0, pages);
}
