//! Reading the device's bytes for the host while the device works, in the order in which the device writes:
//! what the host has of other blocks is compared or read after it, and taken away if it has become old.

use crate::abi::result::Result;
use crate::memory::managed::blocks::{MOST_READINGS, Run, SHORT};
use crate::memory::managed::shared_blocks::{Fetched, Together};
use crate::memory::managed::{State, mirror, pages, watch};
use crate::process::context::Context;
use crate::process::driver::Driver;

/// Maximum number of runs that the host has at once, and of their bytes if the server remembers them: it
/// compares them whenever the host gets new bytes.
const MOST: usize = 48;
const MOST_BYTES: u64 = 4 << 20;

impl State {
    /// Reads the device's bytes of a run, which the server remembers, and takes away those runs that the host
    /// was given before and that have changed by then. Returns false if that is not possible now.
    ///
    /// Before it, reads `more` in the same exchange, as if the host were given one after the other. What has
    /// changed by then is removed from `more`, and so is what there is no room for.
    pub(super) fn fetch_beside_others(
        &mut self,
        driver: &'static Driver,
        context: &'static Context,
        more: &mut Vec<Fetched>,
        accessed: &mut Fetched,
    ) -> Result<bool> {
        if !watch::is_possible(context) {
            more.clear();
            return Ok(false);
        }
        let old = self.surplus(context, accessed.run.len);
        self.part(driver, |together| old.contains(&together.number))?;
        // No other run has to go for these.
        let here = self.together.iter().filter(|together| together.is_in(context)).count();
        more.truncate(MOST.saturating_sub(here + 1));
        let has = self.remembered(context);
        let mut read = |more: &mut Vec<Fetched>| {
            let parts = more.iter_mut().chain([&mut *accessed]);
            let parts = parts.map(|fetched| (context, fetched.run.address, &mut fetched.bytes[..]));
            mirror::read_remembered(parts.collect(), has.clone())
        };
        let mut changed = read(more)?;
        if changed.is_none() && !more.is_empty() {
            more.clear();
            changed = read(more)?;
        }
        let Some(changed) = changed else {
            return Ok(false);
        };
        self.part(driver, |together| {
            let unknown = !together.remembered || changed.contains(&together.run.address);
            together.is_in(context) && unknown
        })?;
        more.retain(|fetched| !changed.contains(&fetched.run.address));
        Ok(true)
    }

    /// The numbers of the oldest runs, so that there is room for another one. Polled ones stay the longest.
    /// Neighbors go together: the program's next accesses fetch them as fewer and longer runs.
    fn surplus(&self, context: &Context, len: u64) -> Vec<u64> {
        let here = self.together.iter().rev().filter(|together| together.is_in(context));
        let (polled, others): (Vec<_>, Vec<_>) = here.partition(|together| self.is_polled(together));
        let (mut runs, mut len) = (1, len);
        let mut fits = |together: &&&Together| {
            (runs, len) = (runs + 1, len + together.run.len);
            runs <= MOST && len <= MOST_BYTES
        };
        let kept = polled.iter().chain(&others).take_while(&mut fits).count();
        let (mut old, mut rest) = match kept.checked_sub(polled.len()) {
            Some(kept) => (others[kept..].to_vec(), others[..kept].to_vec()),
            None => ([&polled[kept..], &others[..]].concat(), Vec::new()),
        };
        let mut n = 0;
        while n < old.len() {
            let run = old[n].run;
            let meets = |other: &&Together| {
                other.run.address + other.run.len == run.address || run.address + run.len == other.run.address
            };
            let (neighbors, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(meets);
            old.extend(neighbors);
            rest = others;
            n += 1;
        }
        old.into_iter().map(|together| together.number).collect()
    }

    /// Whether the program waits for words there, as far as is known.
    pub(super) fn is_polled(&self, together: &Together) -> bool {
        let piece = self.pieces.get(&together.base);
        piece.is_some_and(|(_, piece)| piece.blocks.is_polled(together.run.address))
    }

    /// What the program has of what a context's server remembers.
    pub(crate) fn remembered(&self, context: &Context) -> Vec<u64> {
        let here = self.together.iter().filter(|together| together.remembered && together.is_in(context));
        here.map(|together| together.run.address).collect()
    }

    /// Reads the device's bytes of a run, and then takes away those runs that the host was given before and
    /// that have become old by then, and surplus ones.
    pub(super) fn fetch_after_others(
        &mut self,
        driver: &'static Driver,
        context: &'static Context,
        run: Run,
        bytes: &mut [u8],
    ) -> Result {
        self.publish(pages(driver)?)?;
        let (pinned, managed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.together).into_iter().partition(|together| together.pinned);
        self.together = managed;
        let oldest = pinned.len().saturating_sub(MOST - 1);
        let mut gone: Vec<Together> = Vec::new();
        let mut others: Vec<(Together, Vec<u8>)> = Vec::new();
        for (i, together) in pinned.into_iter().enumerate() {
            if i >= oldest && together.is_short() {
                let now = vec![0; together.run.len as usize];
                others.push((together, now));
            } else {
                gone.push(together);
            }
        }
        let read = read_settled(context, run, bytes, &mut others);
        for (together, now) in others {
            if read.is_ok() && now == together.before { &mut self.together } else { &mut gone }
                .push(together);
        }
        let taken = gone.iter_mut().try_for_each(|together| self.take_away(driver, together));
        read.and(taken)
    }
}

/// Reads a run, and after it the others. A short run, which may contain a word that the program polls, is
/// read until nothing has changed between two readings: bytes that are read one after the other could contain
/// a later write of the device and lack an earlier one.
fn read_settled(context: &Context, run: Run, bytes: &mut [u8], others: &mut [(Together, Vec<u8>)]) -> Result {
    let mut again = vec![0; if run.len <= SHORT { bytes.len() } else { 0 }];
    for _ in 0..MOST_READINGS {
        let own = [&mut *bytes, &mut again[..]].map(|bytes| (context, run.address, bytes));
        let own = own.into_iter().filter(|(.., bytes)| !bytes.is_empty());
        let after = others.iter_mut().map(|(other, now)| (other.context, other.run.address, &mut now[..]));
        mirror::read_in_order(own.chain(after).collect())?;
        if again.is_empty() || *bytes == again[..] {
            break;
        }
        bytes.copy_from_slice(&again);
    }
    Ok(())
}
