//! The parts of devices that a session knows, by number.
//!
//! A program holds them as values, which have no end: so they are kept as long as the session, equal ones once, and there is an end to how many there can be.

use std::collections::HashMap;

use protocol::Status;

/// Parts, or descriptors of parts, of one session at most.
const MAX: usize = 4096;

/// The parts of a session, each `T` being the driver's.
pub struct Parts<T>(Vec<T>);

impl<T> Default for Parts<T> {
    fn default() -> Self {
        Parts(Vec::new())
    }
}

impl<T: PartialEq> Parts<T> {
    /// The number of a part, from 1.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` when the session knows too many.
    pub fn number(&mut self, part: T) -> Result<u32, Status> {
        if let Some(place) = self.0.iter().position(|other| *other == part) {
            return Ok(place as u32 + 1);
        }
        if self.0.len() >= MAX {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.0.push(part);
        Ok(self.0.len() as u32)
    }

    /// The part of a number.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a number that was not given.
    pub fn get(&self, number: u32) -> Result<&T, Status> {
        let place = (number as usize).checked_sub(1).ok_or(Status::INVALID_VALUE)?;
        self.0.get(place).ok_or(Status::INVALID_VALUE)
    }
}

impl<T: PartialEq + Clone> Parts<T> {
    /// The parts of several numbers.
    ///
    /// # Errors
    /// As [`Parts::get`].
    pub fn all(&self, numbers: &[u32]) -> Result<Vec<T>, Status> {
        numbers.iter().map(|number| self.get(*number).cloned()).collect()
    }
}

/// Whether a table of descriptors, or of green contexts, may have one more under a name.
///
/// # Errors
/// `OUT_OF_MEMORY` when it is full, `INVALID_HANDLE` for a name in use.
pub fn may_have<T>(table: &HashMap<u32, T>, name: u32) -> Result<(), Status> {
    if table.len() >= MAX {
        return Err(Status::OUT_OF_MEMORY);
    }
    if table.contains_key(&name) { Err(Status::INVALID_HANDLE) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_have_one_number_and_zero_is_none() {
        let mut parts = Parts::default();
        assert_eq!((parts.number("a"), parts.number("b"), parts.number("a")), (Ok(1), Ok(2), Ok(1)));
        assert_eq!(parts.get(2), Ok(&"b"));
        assert_eq!((parts.get(0), parts.get(3)), (Err(Status::INVALID_VALUE), Err(Status::INVALID_VALUE)));
    }

    #[test]
    fn a_table_takes_new_names_until_it_is_full() {
        let mut table: HashMap<u32, ()> = (1..MAX as u32).map(|name| (name, ())).collect();
        assert_eq!((may_have(&table, 0), may_have(&table, 1)), (Ok(()), Err(Status::INVALID_HANDLE)));
        table.insert(0, ());
        assert_eq!(may_have(&table, MAX as u32), Err(Status::OUT_OF_MEMORY));
    }

    #[test]
    fn there_is_an_end_to_parts() {
        let mut parts = Parts::default();
        for n in 0..MAX {
            assert_eq!(parts.number(n), Ok(n as u32 + 1));
        }
        assert_eq!(parts.number(MAX), Err(Status::OUT_OF_MEMORY));
        assert_eq!(parts.number(7), Ok(8));
    }
}
