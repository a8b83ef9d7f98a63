//! The measuring process: an ordinary program of the CUDA driver API that works with any libcuda.

use std::ffi::{CString, c_void};
use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cudarc::driver::result::{self, ctx, device, event, module, primary_ctx, stream};
use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUfunction, CUstream};

/// Each figure is measured over as many calls as fit into this time, within [`CALLS`].
const TIME: Duration = Duration::from_millis(300);
/// The minimum and the maximum number of calls for a figure.
const CALLS: (usize, usize) = (5, 2000);
/// Launches between two synchronizations. A device queue holds many more, so none of them blocks.
const BATCH: usize = 200;
/// Copies on their way at a time, where they are not waited for one by one. Together they copy as many bytes
/// as the largest single one.
const AHEAD: usize = 4;
/// Of every so many bytes that are copied to the device, some are new each time.
const PAGE: usize = 4096;
/// A kernel that does nothing, for every GPU that CUDA 12 and later support.
const KERNEL: &str =
    ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n";

/// The figure for the way to the server and back.
pub const ROUND_TRIP: &str = "round trip";
/// The figures for copies that are not waited for one by one: to the device, and to the host.
pub const IN_A_ROW: [&str; 2] = ["in a row to device", "in a row to host"];

/// Measures everything, with copies of up to `largest` bytes, and prints a line on stdout for each figure.
pub fn measure(largest: u64) -> Result<()> {
    let largest = usize::try_from(largest).context("copies of this size do not fit into memory")?;
    // SAFETY: loading libcuda runs its initializers, which this process trusts as every CUDA program does.
    let present = unsafe { sys::is_culib_present() };
    ensure!(present, "cannot load libcuda.so.1: neither rgpu's guest libraries nor a driver is installed");
    let begin = Instant::now();
    result::init().context("cuInit")?;
    let device = device::get(0).context("there is no GPU 0")?;
    // SAFETY: the device comes from `device::get`; its primary context is kept to the end of the process.
    let context = unsafe { primary_ctx::retain(device) }.context("cannot create a context")?;
    // SAFETY: the context was just made.
    unsafe { ctx::set_current(context) }.context("cannot use the context")?;
    let gpu = Gpu::new()?;
    gpu.launch()?;
    gpu.synchronize()?;
    report("start to first kernel", "ms", vec![begin.elapsed().as_secs_f64() * 1e3]);
    gpu.calls()?;
    gpu.copies_in_a_row(largest)?;
    for pinned in [true, false] {
        gpu.copies(largest, pinned)?;
    }
    Ok(())
}

struct Gpu {
    nothing: CUfunction,
    stream: CUstream,
}

impl Gpu {
    fn new() -> Result<Gpu> {
        let image = CString::new(KERNEL).context("PTX has no zero byte")?;
        // SAFETY: the image is PTX that ends with a zero byte.
        let module =
            unsafe { module::load_data(image.as_ptr().cast::<c_void>()) }.context("cannot load a kernel")?;
        let name = CString::new("nothing").context("a name has no zero byte")?;
        // SAFETY: the module was just loaded and is never unloaded.
        let nothing = unsafe { module::get_function(module, name) }.context("cannot find the kernel")?;
        Ok(Gpu {
            nothing,
            stream: stream::create(stream::StreamKind::NonBlocking).context("cannot create a stream")?,
        })
    }

    fn launch(&self) -> Result<()> {
        // SAFETY: the kernel takes no parameters and touches no memory.
        unsafe { result::launch_kernel(self.nothing, (1, 1, 1), (1, 1, 1), 0, self.stream, &mut []) }
            .context("cannot launch a kernel")
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: this value owns the stream and never destroys it.
        unsafe { stream::synchronize(self.stream) }.context("cannot synchronize")
    }

    fn calls(&self) -> Result<()> {
        let event = Event::new()?;
        let there_and_back = times(|| {
            event.record(self.stream)?;
            event.synchronize()
        })?;
        report(ROUND_TRIP, "µs", there_and_back);
        let mut each = Vec::new();
        let begin = Instant::now();
        while each.len() < CALLS.0 || begin.elapsed() < TIME {
            let batch = Instant::now();
            for _ in 0..BATCH {
                self.launch()?;
            }
            each.push(batch.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
            self.synchronize()?;
        }
        report("launch", "µs", each);
        let together = times(|| {
            self.launch()?;
            self.synchronize()
        })?;
        report("launch and synchronize", "µs", together);

        let sent = random(64)?;
        let mut received = vec![0_u8; 64];
        let memory = Memory::new(64)?;
        report("64 B to device", "µs", times(|| memory.write(&sent))?);
        report("64 B to host", "µs", times(|| memory.read(&mut received))?);
        ensure!(sent == received, "64 bytes came back changed");
        report("allocate and free 1 MiB", "µs", times(|| Memory::new(1 << 20).map(drop))?);
        Ok(())
    }

    /// Pinned copies, each of which begins before the ones before it are done. So no time is lost between
    /// them, and what limits them is the slowest part of the way: the link to the server, if it is slower
    /// than the server's bus and the device's memory.
    fn copies_in_a_row(&self, largest: usize) -> Result<()> {
        let (mut up, mut down) = (Host::new(largest, true)?, Host::new(largest, true)?);
        up.bytes().copy_from_slice(&random(largest)?);
        let memory = Memory::new(largest)?;
        let size = largest / AHEAD;
        let part = |place: usize| place * size..(place + 1) * size;
        let to = self.in_a_row(|place| {
            let bytes = &mut up.bytes()[part(place)];
            renew(bytes);
            // SAFETY: the device memory is as large as `up`. The copy is done before these bytes are changed
            // again, because `in_a_row` waits for it, and before they are freed.
            unsafe { result::memcpy_htod_async(memory.at(part(place).start), bytes, self.stream) }
                .context("cannot copy to the device")
        })?;
        let from = self.in_a_row(|place| {
            let bytes = &mut down.bytes()[part(place)];
            // SAFETY: as above, and nothing reads these bytes before all copies are done.
            unsafe { result::memcpy_dtoh_async(bytes, memory.at(part(place).start), self.stream) }
                .context("cannot copy to the host")
        })?;
        ensure!(up.bytes() == down.bytes(), "{largest} bytes that were copied in a row came back changed");
        let rate = |all: Vec<f64>| all.into_iter().map(|time| largest as f64 / time / 1e3).collect();
        report(IN_A_ROW[0], "GB/s", rate(to));
        report(IN_A_ROW[1], "GB/s", rate(from));
        Ok(())
    }

    /// Enqueues copies on the stream, [`AHEAD`] of them at a time: `copy` gets the place of the next one,
    /// whose copy before is done. All are done when this returns. Gives the microseconds of each turn of all
    /// places, but not of the first, before which the way was empty.
    fn in_a_row(&self, mut copy: impl FnMut(usize) -> Result<()>) -> Result<Vec<f64>> {
        let copied = (0..AHEAD).map(|_| Event::new()).collect::<Result<Vec<_>>>()?;
        // When the copy of the first place was done, from turn to turn. There is none before the first turn.
        let mut ends = Vec::new();
        let begin = Instant::now();
        loop {
            for (place, copied) in copied.iter().enumerate() {
                copied.synchronize()?;
                if place == 0 {
                    ends.push(Instant::now());
                }
                copy(place)?;
                copied.record(self.stream)?;
            }
            let turns = ends.len().saturating_sub(2);
            if turns >= CALLS.1 || turns >= CALLS.0 && begin.elapsed() >= TIME {
                break;
            }
        }
        self.synchronize()?;
        let full = ends[1..].windows(2);
        Ok(full.map(|turn| turn[1].duration_since(turn[0]).as_secs_f64() * 1e6).collect())
    }

    fn copies(&self, largest: usize, pinned: bool) -> Result<()> {
        let (mut up, mut down) = (Host::new(largest, pinned)?, Host::new(largest, pinned)?);
        up.bytes().copy_from_slice(&random(largest)?);
        let memory = Memory::new(largest)?;
        let kind = if pinned { "pinned" } else { "pageable" };
        let sizes =
            std::iter::successors(Some(4096), |size| Some(size * 8)).take_while(|size| *size < largest);
        for size in sizes.chain([largest]) {
            let (up, down) = (&mut up.bytes()[..size], &mut down.bytes()[..size]);
            memory.write(up)?;
            let rate = |all: Vec<f64>| all.into_iter().map(|time| size as f64 / time / 1e3).collect();
            let to = times_after(|| {
                renew(up);
                let begin = Instant::now();
                memory.write(up)?;
                ctx::synchronize().context("cannot synchronize")?;
                Ok(begin)
            })?;
            let from = times(|| memory.read(down))?;
            ensure!(up == down, "{size} {kind} bytes came back changed");
            down.fill(0);
            report(&format!("{kind} to device, {}", bytes(size)), "GB/s", rate(to));
            report(&format!("{kind} to host, {}", bytes(size)), "GB/s", rate(from));
        }
        Ok(())
    }
}

/// Device memory, freed with this value.
struct Memory(CUdeviceptr);

impl Memory {
    fn new(size: usize) -> Result<Memory> {
        // SAFETY: a context is current; the pointer is used within `size` bytes and freed once.
        let pointer = unsafe { result::malloc_sync(size) };
        Ok(Memory(pointer.with_context(|| format!("cannot allocate {size} bytes on the GPU"))?))
    }

    /// An address in it.
    fn at(&self, offset: usize) -> CUdeviceptr {
        self.0 + offset as CUdeviceptr
    }

    /// `from` must not be longer than this memory.
    fn write(&self, from: &[u8]) -> Result<()> {
        // SAFETY: the device memory is as large as `from`, by the contract above.
        unsafe { result::memcpy_htod_sync(self.0, from) }.context("cannot copy to the device")
    }

    /// `to` must not be longer than this memory.
    fn read(&self, to: &mut [u8]) -> Result<()> {
        // SAFETY: the device memory is as large as `to`, by the contract above.
        unsafe { result::memcpy_dtoh_sync(to, self.0) }.context("cannot copy to the host")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freed here alone.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// An event without a time.
struct Event(CUevent);

impl Event {
    fn new() -> Result<Event> {
        event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .context("cannot create an event")
            .map(Event)
    }

    fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: this value owns the event; streams are never destroyed here.
        unsafe { event::record(self.0, stream) }.context("cannot record an event")
    }

    /// Waits for what came before the event, if it was recorded.
    fn synchronize(&self) -> Result<()> {
        // SAFETY: this value owns the event.
        unsafe { event::synchronize(self.0) }.context("cannot wait for an event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and destroyed here alone.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// Host memory, page-locked by CUDA or ordinary.
enum Host {
    Pinned(*mut u8, usize),
    Pageable(Vec<u8>),
}

impl Host {
    fn new(size: usize, pinned: bool) -> Result<Host> {
        if !pinned {
            return Ok(Host::Pageable(vec![0; size]));
        }
        // SAFETY: a context is current; the memory is used within `size` bytes and freed once.
        let pointer = unsafe { result::malloc_host(size, 0) };
        let pointer = pointer.with_context(|| format!("cannot pin {size} bytes"))?.cast::<u8>();
        // SAFETY: this value owns the memory, which has `size` bytes and is written before it is read.
        unsafe { pointer.write_bytes(0, size) };
        Ok(Host::Pinned(pointer, size))
    }

    fn bytes(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: memory of that length, all of it written in `new`, borrowed as this value is.
            Host::Pinned(pointer, size) => unsafe { std::slice::from_raw_parts_mut(*pointer, *size) },
            Host::Pageable(bytes) => bytes,
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Host::Pinned(pointer, _) = self {
            // SAFETY: allocated by `new`, and freed here alone.
            let _ = unsafe { result::free_host(pointer.cast()) };
        }
    }
}

/// Microseconds of each of many calls.
fn times(mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    times_after(|| {
        let begin = Instant::now();
        call().map(|()| begin)
    })
}

/// The same for calls that need something first: each gives the time when that was done.
fn times_after(mut call: impl FnMut() -> Result<Instant>) -> Result<Vec<f64>> {
    let begin = Instant::now();
    let mut all = Vec::new();
    while all.len() < CALLS.0 || (all.len() < CALLS.1 && begin.elapsed() < TIME) {
        all.push(call()?.elapsed().as_secs_f64() * 1e6);
    }
    Ok(all)
}

/// Changes something in every page, so that a server with a cache does not have these bytes from the copy
/// before.
fn renew(bytes: &mut [u8]) {
    for number in bytes.chunks_mut(PAGE).filter_map(|page| page.first_chunk_mut()) {
        *number = u64::from_le_bytes(*number).wrapping_add(1).to_le_bytes();
    }
}

fn report(name: &str, unit: &str, mut values: Vec<f64>) {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let (median, low, high) = (values[count / 2], values[count / 10], values[count - 1 - count / 10]);
    println!("{name}\t{unit}\t{median:.4}\t{low:.4}\t{high:.4}");
}

/// Bytes that differ from every earlier run.
fn random(size: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; size];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn bytes(size: usize) -> String {
    match size {
        size if size >= 1 << 20 => format!("{} MiB", size >> 20),
        size => format!("{} KiB", size >> 10),
    }
}
