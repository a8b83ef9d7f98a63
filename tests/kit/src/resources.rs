//! What processes hold, from `/proc`: for tests with many sessions.

use std::fs;
use std::ops::Sub;
use std::path::Path;
use std::time::Duration;

/// What some processes hold together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resources {
    /// Processes.
    pub processes: usize,
    /// Threads.
    pub threads: usize,
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of memory.
    pub mappings: usize,
    /// KiB of memory: their own, and their part of what is shared (`Pss`).
    pub memory_kib: u64,
    /// KiB of it that are locked or pinned (`VmLck`, `VmPin`).
    pub pinned_kib: u64,
}

impl Sub for Resources {
    type Output = Resources;

    fn sub(self, less: Resources) -> Resources {
        Resources {
            processes: self.processes.saturating_sub(less.processes),
            threads: self.threads.saturating_sub(less.threads),
            descriptors: self.descriptors.saturating_sub(less.descriptors),
            mappings: self.mappings.saturating_sub(less.mappings),
            memory_kib: self.memory_kib.saturating_sub(less.memory_kib),
            pinned_kib: self.pinned_kib.saturating_sub(less.pinned_kib),
        }
    }
}

/// The sum of the numbers behind `names` in a file of `/proc`. A process that has ended has none.
fn numbers(path: &str, names: &[&str]) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let of = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        names.contains(&name).then(|| rest.split_whitespace().next()?.parse::<u64>().ok())?
    };
    text.lines().filter_map(of).sum()
}

/// The process and all that it has started, directly or not.
pub fn family(process: u32) -> Vec<u32> {
    let mut all = vec![process];
    let mut at = 0;
    while let Some(parent) = all.get(at).copied() {
        at += 1;
        for task in tasks(parent) {
            let children =
                fs::read_to_string(format!("/proc/{parent}/task/{task}/children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    all
}

fn tasks(process: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{process}/task"));
    let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).collect()
}

/// What these processes hold.
pub fn resources(processes: &[u32]) -> Resources {
    let mut sum = Resources { processes: processes.len(), ..Resources::default() };
    for process in processes {
        sum.threads += tasks(*process).len();
        sum.descriptors +=
            fs::read_dir(format!("/proc/{process}/fd")).map_or(0, |descriptors| descriptors.count());
        sum.mappings +=
            fs::read_to_string(format!("/proc/{process}/maps")).map_or(0, |maps| maps.lines().count());
        sum.memory_kib += numbers(&format!("/proc/{process}/smaps_rollup"), &["Pss"]);
        sum.pinned_kib += numbers(&format!("/proc/{process}/status"), &["VmLck", "VmPin"]);
    }
    sum
}

/// How often threads of these processes were given a processor, since they began.
fn runs(processes: &[u32]) -> u64 {
    let of = |process: &u32| -> u64 {
        let names = ["voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"];
        tasks(*process)
            .iter()
            .map(|task| numbers(&format!("/proc/{process}/task/{task}/status"), &names))
            .sum()
    };
    processes.iter().map(of).sum()
}

/// Whether all threads of these processes sleep. One that is only waiting for a processor, as on a busy
/// machine, does not.
fn sleep(processes: &[u32]) -> bool {
    let sleeps =
        |stat: &str| stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['S', 'I', 'Z']));
    let of = |process: &u32| {
        let stats = tasks(*process).into_iter().map(|task| format!("/proc/{process}/task/{task}/stat"));
        // A thread that has ended has no state.
        stats.into_iter().all(|stat| sleeps(&fs::read_to_string(stat).unwrap_or_default()))
    };
    processes.iter().all(of)
}

/// Waits until no thread of these processes has anything to do for a whole second.
pub fn until_idle(processes: impl Fn() -> Vec<u32>) {
    let seen = || {
        let all = processes();
        (runs(&all), sleep(&all), all)
    };
    crate::until("no thread has anything to do for a second", || {
        let before = seen();
        std::thread::sleep(Duration::from_secs(1));
        before.1 && before == seen()
    });
}

/// Lets this process open as many descriptors as it may.
pub fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
}

/// Sets the number of descriptors that a process may have, and returns the previous one.
pub fn limit_descriptors(process: u32, most: u64) -> u64 {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let (pid, none) = (process.cast_signed(), std::ptr::null());
    // SAFETY: the call reads and writes local variables only.
    unsafe {
        assert_eq!(libc::prlimit(pid, libc::RLIMIT_NOFILE, none, &mut before), 0);
        let limit = libc::rlimit { rlim_cur: most, ..before };
        assert_eq!(libc::prlimit(pid, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()), 0);
    }
    before.rlim_cur
}

/// Lets a process open nothing more, because no number below its limit is free. Returns the limit before.
pub fn leave_no_descriptors(process: u32) -> u64 {
    let free = (0..).find(|number| !Path::new(&format!("/proc/{process}/fd/{number}")).exists());
    limit_descriptors(process, free.unwrap())
}

/// How many sessions a test of scale opens: `RGPU_SCALE`, or few enough for every run of the tests.
pub fn scale(usual: usize) -> usize {
    std::env::var("RGPU_SCALE").map_or(usual, |number| number.parse().expect("RGPU_SCALE is a number"))
}
