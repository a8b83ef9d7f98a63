// SPDX-License-Identifier: GPL-2.0
/*
 * Pages of channels, pinned pages of programs, and the extents that describe
 * them to the device.
 *
 * A request can have as many descriptors as the queue is long, each physically
 * contiguous. The extents of gigabytes of scattered 4 KiB pages take megabytes,
 * so a list of extents consists of chunks of increasing size, from one page up
 * to RGPU_CHUNK_MAX_ORDER.
 */
#include <linux/capability.h>
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "rgpu.h"

#define RGPU_CHUNK_MAX_ORDER	get_order(SZ_256K)
#define RGPU_BLOCK_MAX_ORDER	get_order(SZ_2M)
#define RGPU_PIN_BATCH		(PAGE_SIZE / sizeof(struct page *))

void rgpu_extents_init(struct rgpu_extents *extents)
{
	*extents = (struct rgpu_extents){};
	INIT_LIST_HEAD(&extents->chunks);
}

void rgpu_extents_free(struct rgpu_extents *extents)
{
	struct rgpu_extent_chunk *chunk, *next;

	list_for_each_entry_safe(chunk, next, &extents->chunks, node) {
		__free_pages(chunk->page, chunk->order);
		kfree(chunk);
	}
	rgpu_extents_init(extents);
}

static struct virtio_rgpu_extent *rgpu_chunk_list(const struct rgpu_extent_chunk *chunk)
{
	return page_address(chunk->page);
}

static struct rgpu_extent_chunk *rgpu_chunk_last(const struct rgpu_extents *extents)
{
	if (list_empty(&extents->chunks))
		return NULL;
	return list_last_entry(&extents->chunks, struct rgpu_extent_chunk, node);
}

/* Adds the list to @sg, which has room for extents->chunk_count entries. */
void rgpu_extents_to_sg(const struct rgpu_extents *extents, struct scatterlist *sg)
{
	const struct rgpu_extent_chunk *chunk;

	list_for_each_entry(chunk, &extents->chunks, node) {
		sg_set_page(sg, chunk->page, chunk->used * sizeof(struct virtio_rgpu_extent), 0);
		sg++;
	}
}

static struct rgpu_extent_chunk *rgpu_chunk_add(struct rgpu_extents *extents)
{
	unsigned int order = min_t(unsigned int, extents->chunk_count, RGPU_CHUNK_MAX_ORDER);
	struct rgpu_extent_chunk *chunk = kmalloc(sizeof(*chunk), GFP_KERNEL_ACCOUNT);

	if (!chunk)
		return NULL;
	for (;; order--) {
		gfp_t gfp = GFP_KERNEL_ACCOUNT;

		if (order)
			gfp |= __GFP_NORETRY | __GFP_NOWARN;
		chunk->page = alloc_pages(gfp, order);
		if (chunk->page || !order)
			break;
	}
	if (!chunk->page) {
		kfree(chunk);
		return NULL;
	}
	chunk->order = order;
	chunk->used = 0;
	list_add_tail(&chunk->node, &extents->chunks);
	extents->chunk_count++;
	return chunk;
}

/* Appends bytes within one page or one block of contiguous pages. */
static int rgpu_extents_add(struct rgpu_extents *extents, struct page *page, size_t offset,
			    size_t len)
{
	struct rgpu_extent_chunk *chunk = rgpu_chunk_last(extents);
	phys_addr_t addr = page_to_phys(page) + offset;
	struct virtio_rgpu_extent *extent;

	if (chunk) {
		extent = &rgpu_chunk_list(chunk)[chunk->used - 1];
		if (le64_to_cpu(extent->addr) + le64_to_cpu(extent->len) == addr &&
		    extents->last_page + 1 == page) {
			le64_add_cpu(&extent->len, len);
			goto added;
		}
	}
	if (!chunk || chunk->used == (PAGE_SIZE << chunk->order) / sizeof(*extent)) {
		chunk = rgpu_chunk_add(extents);
		if (!chunk)
			return -ENOMEM;
	}
	extent = &rgpu_chunk_list(chunk)[chunk->used++];
	extent->addr = cpu_to_le64(addr);
	extent->len = cpu_to_le64(len);
	extents->count++;
added:
	extents->bytes += len;
	extents->last_page = page + ((offset + len - 1) >> PAGE_SHIFT);
	return 0;
}

/**
 * rgpu_pages_alloc - allocate a channel's memory
 * @chan: a channel without pages
 * @count: number of pages
 *
 * Allocates the largest available blocks, so that there are few extents, and
 * splits them, because programs map single pages and pages are freed one by one.
 * Publishes chan->pages last.
 *
 * Return: 0 or an errno.
 */
int rgpu_pages_alloc(struct rgpu_channel *chan, unsigned long count)
{
	unsigned int order = RGPU_BLOCK_MAX_ORDER;
	struct page **pages;
	unsigned long done = 0;
	int ret;

	ret = rgpu_user_charge_pages(chan->user, count);
	if (ret)
		return ret;
	pages = kvmalloc_array(count, sizeof(*pages), GFP_KERNEL_ACCOUNT);
	if (!pages) {
		ret = -ENOMEM;
		goto err_uncharge;
	}
	rgpu_extents_init(&chan->extents);

	while (done < count) {
		gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO;
		struct page *block;
		unsigned int i;

		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			goto err_free;
		}
		order = min_t(unsigned int, order, ilog2(count - done));
		if (order)
			gfp |= __GFP_NORETRY | __GFP_NOWARN;
		block = alloc_pages(gfp, order);
		if (!block && order) {
			order--;
			continue;
		}
		if (!block) {
			ret = -ENOMEM;
			goto err_free;
		}
		if (order)
			split_page(block, order);
		for (i = 0; i < 1U << order; i++)
			pages[done++] = block + i;
		ret = rgpu_extents_add(&chan->extents, block, 0, PAGE_SIZE << order);
		if (ret)
			goto err_free;
		cond_resched();
	}
	if (chan->extents.count > chan->dev->max_extents) {
		ret = -E2BIG;
		goto err_free;
	}

	chan->page_count = count;
	/* Readers that see the pages also see everything above. */
	smp_store_release(&chan->pages, pages);
	return 0;

err_free:
	while (done)
		__free_page(pages[--done]);
	kvfree(pages);
	rgpu_extents_free(&chan->extents);
err_uncharge:
	rgpu_user_uncharge_pages(chan->user, count);
	return ret;
}

/* Drops the channel's references; mapped pages stay until they are unmapped. */
void rgpu_pages_free(struct rgpu_channel *chan)
{
	unsigned long i;

	for (i = 0; i < chan->page_count; i++)
		put_page(chan->pages[i]);
	if (chan->page_count)
		rgpu_user_uncharge_pages(chan->user, chan->page_count);
	kvfree(chan->pages);
	chan->pages = NULL;
	chan->page_count = 0;
	rgpu_extents_free(&chan->extents);
}

static void rgpu_extents_unpin(struct rgpu_extents *extents, bool dirty)
{
	struct rgpu_extent_chunk *chunk;
	unsigned int i;

	list_for_each_entry(chunk, &extents->chunks, node) {
		for (i = 0; i < chunk->used; i++) {
			const struct virtio_rgpu_extent *extent = &rgpu_chunk_list(chunk)[i];
			u64 addr = le64_to_cpu(extent->addr);
			unsigned long first = PHYS_PFN(addr);
			unsigned long last = PHYS_PFN(addr + le64_to_cpu(extent->len) - 1);

			unpin_user_page_range_dirty_lock(pfn_to_page(first), last - first + 1,
							 dirty);
			cond_resched();
		}
	}
	rgpu_extents_free(extents);
}

static unsigned int rgpu_pin_flags(bool read_only)
{
	if (!read_only)
		return FOLL_WRITE | FOLL_LONGTERM;
	/*
	 * A long-term pin for reading must see the program's later writes. Some
	 * kernels only guarantee that if the pin breaks copy-on-write like a
	 * forced write.
	 */
#ifdef RGPU_READ_PIN_NEEDS_FORCE
	return FOLL_WRITE | FOLL_FORCE | FOLL_LONGTERM;
#else
	return FOLL_LONGTERM;
#endif
}

/* Pins the pages of [addr, addr + size) and adds them to @extents; all or none. */
static int rgpu_extents_pin(struct rgpu_extents *extents, unsigned long addr, size_t size,
			    bool read_only)
{
	struct page **pages = (struct page **)__get_free_page(GFP_KERNEL);
	int ret = 0;

	if (!pages)
		return -ENOMEM;
	while (size) {
		unsigned long want = DIV_ROUND_UP(offset_in_page(addr) + size, PAGE_SIZE);
		int got, i;

		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			break;
		}
		want = min_t(unsigned long, want, RGPU_PIN_BATCH);
		got = pin_user_pages_fast(addr & PAGE_MASK, want, rgpu_pin_flags(read_only), pages);
		if (got <= 0) {
			ret = got ? got : -EFAULT;
			break;
		}
		for (i = 0; i < got; i++) {
			size_t offset = offset_in_page(addr);
			size_t len = min_t(size_t, size, PAGE_SIZE - offset);

			ret = rgpu_extents_add(extents, pages[i], offset, len);
			if (ret)
				break;
			addr += len;
			size -= len;
		}
		if (ret) {
			unpin_user_pages(pages + i, got - i);
			break;
		}
		cond_resched();
	}
	free_page((unsigned long)pages);
	if (ret)
		rgpu_extents_unpin(extents, false);
	return ret;
}

/*
 * Counts pages against RLIMIT_MEMLOCK, as RDMA does: without mmap_lock, which a
 * program may hold for as long as it likes (it maps a file of a file system that is
 * its own).
 */
static int rgpu_charge_pinned(struct mm_struct *mm, unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (atomic64_add_return(pages, &mm->pinned_vm) <= limit || capable(CAP_IPC_LOCK))
		return 0;
	atomic64_sub(pages, &mm->pinned_vm);
	return -ENOMEM;
}

static void rgpu_uncharge_pinned(struct mm_struct *mm, unsigned long pages)
{
	atomic64_sub(pages, &mm->pinned_vm);
}

/**
 * rgpu_region_pin - pin memory of the calling program
 * @chan: a channel of the calling process
 * @addr: address of the first byte
 * @size: size in bytes
 * @read_only: whether the device only reads
 *
 * Charges the pages to the process and to the channel's user. Takes mmap_lock.
 *
 * Return: a region that is not live and has no number yet, or an ERR_PTR().
 */
struct rgpu_region *rgpu_region_pin(struct rgpu_channel *chan, u64 addr, u64 size,
				    bool read_only)
{
	struct rgpu_region *region;
	unsigned long end;
	int ret;

	if (!size || addr != (unsigned long)addr || size != (size_t)size ||
	    check_add_overflow((unsigned long)addr, (unsigned long)size, &end))
		return ERR_PTR(-EINVAL);
	if (!access_ok((void __user *)(unsigned long)addr, size))
		return ERR_PTR(-EFAULT);

	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return ERR_PTR(-ENOMEM);
	rgpu_extents_init(&region->extents);
	region->read_only = read_only;
	region->page_count = PHYS_PFN(PAGE_ALIGN(end)) - PHYS_PFN(addr);

	ret = rgpu_user_charge_pages(chan->user, region->page_count);
	if (ret)
		goto err_free;
	ret = rgpu_charge_pinned(chan->mm, region->page_count);
	if (ret)
		goto err_uncharge;
	ret = rgpu_extents_pin(&region->extents, addr, size, read_only);
	if (ret)
		goto err_unaccount;
	return region;

err_unaccount:
	rgpu_uncharge_pinned(chan->mm, region->page_count);
err_uncharge:
	rgpu_user_uncharge_pages(chan->user, region->page_count);
err_free:
	kfree(region);
	return ERR_PTR(ret);
}

/* Unpins and frees a region that the device cannot access. May wait for page locks. */
void rgpu_region_unpin(struct rgpu_channel *chan, struct rgpu_region *region)
{
	rgpu_extents_unpin(&region->extents, !region->read_only);
	rgpu_uncharge_pinned(chan->mm, region->page_count);
	rgpu_user_uncharge_pages(chan->user, region->page_count);
	kfree(region);
}
