//! Values by owner, virtual machine and program, whose names clients choose.
//!
//! Each name costs memory here and in Prometheus, and a client can invent any number of names. So the number
//! of rows is limited, in all and for one owner. Values without room are counted under the name [`OTHER`]. A
//! new row may replace a row that was unused for a day. A client may call itself that, too: which rows are
//! for values without room is known to the ledger, not taken from their names.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The name for values without room.
pub const OTHER: &str = "other";
/// Maximum rows, besides those for values without room.
const MOST: usize = 1024;
/// Maximum rows of one owner.
const MOST_OF_ONE: usize = 64;
/// A row that was unused for this long may be replaced.
const UNUSED: Duration = Duration::from_secs(24 * 60 * 60);

/// The names of a row: the owner, a virtual machine or host, and a program. A row stays as long as its key is
/// held.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(Arc<[String; 3]>);

impl Key {
    /// The names, as labels.
    pub fn labels(&self) -> [&str; 3] {
        self.0.each_ref().map(String::as_str)
    }
}

impl Borrow<[String; 3]> for Key {
    fn borrow(&self) -> &[String; 3] {
        &self.0
    }
}

#[derive(Debug)]
struct Row<T> {
    value: T,
    owner: String,
    used: Instant,
    /// Whether it has values that had no room elsewhere.
    overflow: bool,
}

impl<T> Row<T> {
    fn is_unused(&self, key: &Key, now: Instant) -> bool {
        Arc::strong_count(&key.0) == 1 && now.saturating_duration_since(self.used) >= UNUSED
    }
}

/// Values by [`Key`].
#[derive(Debug)]
pub struct Ledger<T> {
    rows: BTreeMap<Key, Row<T>>,
}

impl<T> Default for Ledger<T> {
    fn default() -> Ledger<T> {
        Ledger { rows: BTreeMap::new() }
    }
}

impl<T: Default> Ledger<T> {
    /// The row for these names, whose first one is the owner. If there is no room: the owner's row for
    /// [`OTHER`], or that of all owners.
    pub fn enter(&mut self, names: [&str; 3], now: Instant) -> Key {
        self.enter_for(names[0], names, now)
    }

    /// The same for an owner with several names: their rows count together.
    pub fn enter_for(&mut self, owner: &str, names: [&str; 3], now: Instant) -> Key {
        let names = names.map(str::to_owned);
        if self.rows.contains_key(&names) {
            return self.used(Key(Arc::new(names)), owner, now);
        }
        let counted = || self.rows.values().filter(|row| !row.overflow);
        let (all, own) = (counted().count(), counted().filter(|row| row.owner == owner).count());
        let full_of_own = own >= MOST_OF_ONE;
        if full_of_own || all >= MOST {
            let replaceable = |(key, row): &(&Key, &Row<T>)| {
                !row.overflow && row.is_unused(key, now) && (!full_of_own || row.owner == owner)
            };
            let oldest = self.rows.iter().filter(replaceable).min_by_key(|(_, row)| row.used);
            match oldest.map(|(key, _)| key.clone()) {
                Some(oldest) => drop(self.rows.remove(&oldest)),
                None => {
                    self.rows.retain(|key, row| !(row.overflow && row.is_unused(key, now)));
                    let owner = if own > 0 { owner } else { OTHER };
                    let key = self.used(Key(Arc::new([owner, OTHER, OTHER].map(str::to_owned))), owner, now);
                    self.rows.entry(key.clone()).and_modify(|row| row.overflow = true);
                    return key;
                }
            }
        }
        self.used(Key(Arc::new(names)), owner, now)
    }

    fn used(&mut self, key: Key, owner: &str, now: Instant) -> Key {
        if let Some((known, _)) = self.rows.get_key_value(&key) {
            let known = known.clone();
            self.rows.entry(known.clone()).and_modify(|row| row.used = now);
            return known;
        }
        let row = Row { value: T::default(), owner: owner.to_owned(), used: now, overflow: false };
        self.rows.insert(key.clone(), row);
        key
    }

    /// The value of a row.
    pub fn value(&mut self, key: &Key, now: Instant) -> &mut T {
        let new = || Row { value: T::default(), owner: key.0[0].clone(), used: now, overflow: false };
        let row = self.rows.entry(key.clone()).or_insert_with(new);
        row.used = now;
        &mut row.value
    }

    /// All rows.
    pub fn rows(&self) -> impl Iterator<Item = (&Key, &T)> {
        self.rows.iter().map(|(key, row)| (key, &row.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_invents_names_uses_up_only_its_own_room() {
        let (mut ledger, now) = (Ledger::<u64>::default(), Instant::now());
        for number in 0..100_000 {
            let key = ledger.enter(["hostile", "vm", &format!("program{number}")], now);
            *ledger.value(&key, now) += 1;
        }
        assert_eq!(ledger.rows().count(), MOST_OF_ONE + 1);
        assert_eq!(ledger.rows().map(|(_, value)| value).sum::<u64>(), 100_000);
        let honest = ledger.enter(["honest", "vm", "train"], now);
        assert_eq!(honest.labels(), ["honest", "vm", "train"]);
        let others = ledger.enter(["hostile", "vm", "again"], now);
        assert_eq!(others.labels(), ["hostile", OTHER, OTHER]);
    }

    #[test]
    fn an_owner_with_many_names_uses_up_only_its_own_room() {
        let (mut ledger, now) = (Ledger::<u64>::default(), Instant::now());
        for (lease, program) in (0..16).flat_map(|lease| (0..64).map(move |program| (lease, program))) {
            ledger.enter_for("a", [&format!("a/{lease}"), "vm", &format!("program{program}")], now);
        }
        assert_eq!(ledger.enter_for("a", ["a/99", "vm", "train"], now).labels(), ["a", OTHER, OTHER]);
        assert_eq!(ledger.enter(["b", "vm", "train"], now).labels(), ["b", "vm", "train"]);
    }

    #[test]
    fn too_many_owners_share_one_row() {
        let (mut ledger, now) = (Ledger::<u64>::default(), Instant::now());
        for number in 0..10_000 {
            ledger.enter([&format!("address{number}"), "vm", "program"], now);
        }
        assert_eq!(ledger.rows().count(), MOST + 1);
        assert_eq!(ledger.enter(["late", "vm", "program"], now).labels(), [OTHER; 3]);
    }

    #[test]
    fn clients_that_call_themselves_other_use_up_only_their_own_room() {
        let now = Instant::now();
        let (mut leases, mut addresses) = (Ledger::<u64>::default(), Ledger::<u64>::default());
        for number in 0..2 * MOST {
            leases.enter_for("a", [&format!("a {number}"), OTHER, OTHER], now);
            addresses.enter([&format!("address{number}"), OTHER, OTHER], now);
        }
        assert_eq!(leases.rows().count(), MOST_OF_ONE + 1);
        assert_eq!(addresses.rows().count(), MOST + 1);
    }

    #[test]
    fn rows_for_values_without_room_stay_only_as_long_as_they_are_used() {
        let (mut ledger, mut now) = (Ledger::<u64>::default(), Instant::now());
        for day in 0..3 {
            for owner in 0..MOST / MOST_OF_ONE {
                for program in 0..=MOST_OF_ONE {
                    let (owner, program) = (format!("{day}.{owner}"), format!("program{program}"));
                    ledger.enter([&owner, "vm", &program], now);
                }
            }
            now += UNUSED;
        }
        assert_eq!(ledger.rows().count(), MOST + MOST / MOST_OF_ONE);
    }

    #[test]
    fn only_an_unused_row_is_replaced() {
        let (mut ledger, start) = (Ledger::<u64>::default(), Instant::now());
        let held = ledger.enter(["a", "vm", "held"], start);
        for number in 1..MOST_OF_ONE {
            ledger.enter(["a", "vm", &format!("program{number}")], start);
        }
        let later = start + UNUSED;
        assert_eq!(ledger.enter(["a", "vm", "new"], start).labels(), ["a", OTHER, OTHER]);
        assert_eq!(ledger.enter(["a", "vm", "new"], later).labels(), ["a", "vm", "new"]);
        for number in 0..MOST_OF_ONE {
            ledger.enter(["a", "vm", &format!("later{number}")], later);
        }
        assert!(ledger.rows().any(|(key, _)| *key == held));
        assert_eq!(ledger.enter(["a", "vm", "held"], later), held);
    }
}
