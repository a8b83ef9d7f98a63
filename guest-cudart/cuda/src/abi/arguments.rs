//! Pointers that a program passes, as types that know what the function may do with them.
//!
//! Each is the bare pointer in memory, so an exported function takes them in the places of C's pointers. What CUDA's manual asks of an argument, the type's
//! contract repeats: the caller of the exported function, which is `unsafe` for that reason, vouches for it. Nothing else makes these values but the conversions
//! from references and the `unsafe` constructors here, and none outlives its call, so reading and writing through them is safe for the code that has them. Whether
//! a pointer is NULL is checked here: that is CUDA's `INVALID_VALUE`.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

use crate::abi::result::Result;
use client::Status;

/// `Err(INVALID_VALUE)` for a NULL pointer.
#[inline]
pub(crate) fn non_null<T: ?Sized>(pointer: *const T) -> Result {
    if pointer.is_null() { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

/// Writes a result through a bare pointer, which the caller knows the type of.
///
/// # Safety
/// `to` is NULL, which is an invalid value, or may be written.
#[inline]
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result {
    non_null(to)?;
    // SAFETY: not NULL, and the caller says that it may be written.
    unsafe { to.write(value) };
    Ok(())
}

/// How many entries the arrays of a function have.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Count<N = usize>(N);

impl<N: Copy + TryInto<usize>> Count<N> {
    /// The number.
    #[inline]
    pub fn get(self) -> usize {
        // What no array can have is as many as the longest could.
        self.0.try_into().unwrap_or(usize::MAX)
    }
}

/// Where a result goes: NULL, or a place that may be written with a `T` until the function returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<T> Out<'_, T> {
    /// Whether the program wants no result.
    #[inline]
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn required(&self) -> Result {
        non_null(self.0)
    }

    /// Writes the result.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn put(&self, value: T) -> Result {
        self.required()?;
        // SAFETY: not NULL, and so a place that may be written, by the type's contract.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes the result if the program wants it.
    #[inline]
    pub fn put_if_wanted(&self, value: T) {
        if !self.is_null() {
            // SAFETY: not NULL, and so a place that may be written, by the type's contract.
            unsafe { self.0.write(value) };
        }
    }
}

impl<'a, T> From<&'a mut T> for Out<'a, T> {
    fn from(place: &'a mut T) -> Self {
        Out(place, PhantomData)
    }
}

/// What a function reads: NULL, or a `T` that may be read until the function returns. `T` is plain data of C, of which every bit pattern that a program can have written is a value.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<'a, T>(*const T, PhantomData<&'a T>);

impl<'a, T: Copy> In<'a, T> {
    /// Whether the program gives nothing.
    #[inline]
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn required(&self) -> Result {
        non_null(self.0)
    }

    /// The value.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn get(&self) -> Result<T> {
        self.optional().ok_or(Status::INVALID_VALUE)
    }

    /// The value, unless it is NULL.
    #[inline]
    pub fn optional(&self) -> Option<T> {
        // SAFETY: a value that may be read if it is not NULL, by the type's contract.
        (!self.is_null()).then(|| unsafe { self.0.read() })
    }
}

impl<'a, T> From<&'a T> for In<'a, T> {
    fn from(value: &'a T) -> Self {
        In(value, PhantomData)
    }
}

/// What a function reads and overwrites: NULL, or a `T` that may be read and written until the function returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct InOut<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<'a, T> From<&'a mut T> for InOut<'a, T> {
    fn from(place: &'a mut T) -> Self {
        InOut(place, PhantomData)
    }
}

impl<T: Copy> InOut<'_, T> {
    /// The value as it is.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn get(&self) -> Result<T> {
        In(self.0, PhantomData).get()
    }

    /// Overwrites the value.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn put(&self, value: T) -> Result {
        Out(self.0, PhantomData).put(value)
    }
}

/// An array that a function reads: NULL, or as many entries as the function's [`Count`] says, which may be read until it returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Array<'a, T>(*const T, PhantomData<&'a [T]>);

impl<'a, T: Copy> Array<'a, T> {
    /// No array.
    pub const NULL: Array<'a, T> = Array(std::ptr::null(), PhantomData);

    /// Whether the program gives none.
    #[inline]
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn required(&self) -> Result {
        non_null(self.0)
    }

    /// Its entries. An array of none may be NULL.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    pub fn entries<N: Copy + TryInto<usize>>(&self, count: Count<N>) -> Result<&'a [T]> {
        // SAFETY: as many entries as the count says, by the type's contract.
        unsafe { self.first(count.get()) }
    }

    /// As [`entries`](Self::entries), for a function whose arrays differ in length, and for one that reads fewer entries than there are.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    ///
    /// # Safety
    /// Unless it is NULL, it has `count` entries.
    pub unsafe fn first(&self, count: usize) -> Result<&'a [T]> {
        if count == 0 {
            return Ok(&[]);
        }
        self.required()?;
        // A number that no array can have: this is refused where others are found to be wrong at the first bad entry.
        if count > isize::MAX as usize / size_of::<T>().max(1) {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not NULL, and as long as the caller says; readable by the type's contract.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

/// An array of places for results: NULL, or places that may be written until the function returns. Another argument says how many there are.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct OutArray<'a, T>(*mut T, PhantomData<&'a mut [T]>);

impl<T: Copy> OutArray<'_, T> {
    /// No array.
    pub const NULL: Self = OutArray(std::ptr::null_mut(), PhantomData);

    /// Whether the program wants no results.
    #[inline]
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn required(&self) -> Result {
        non_null(self.0)
    }

    /// Writes results into the first places.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    ///
    /// # Safety
    /// Unless it is NULL, it has as many places as there are values.
    pub unsafe fn put(&self, values: impl IntoIterator<Item = T>) -> Result {
        self.required()?;
        for (i, value) in values.into_iter().enumerate() {
            // SAFETY: not NULL, with room for the values as the caller says; writable by the type's contract.
            unsafe { self.0.add(i).write(value) };
        }
        Ok(())
    }
}

/// Text that a function reads: NULL, or bytes up to a NUL that may be read until the function returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn required(&self) -> Result {
        non_null(self.0)
    }

    /// The text.
    ///
    /// # Errors
    /// `INVALID_VALUE` for NULL.
    #[inline]
    pub fn get(&self) -> Result<&'a CStr> {
        self.required()?;
        // SAFETY: not NULL, and so text that ends with NUL, by the type's contract.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }

    /// The text; an empty one for NULL.
    #[inline]
    pub fn or_empty(&self) -> &'a CStr {
        self.get().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_an_invalid_value_and_nothing_is_written() {
        let nowhere = Out::<u32>(std::ptr::null_mut(), PhantomData);
        assert_eq!(nowhere.put(1), Err(Status::INVALID_VALUE));
        nowhere.put_if_wanted(1);
        assert_eq!(In::<u32>(std::ptr::null(), PhantomData).get(), Err(Status::INVALID_VALUE));
        assert!(Text(std::ptr::null(), PhantomData).get().is_err());
        // SAFETY: NULL has no entries.
        assert_eq!(unsafe { Array::<u32>::NULL.first(1) }, Err(Status::INVALID_VALUE));
        // SAFETY: NULL has no entries.
        assert_eq!(unsafe { Array::<u32>::NULL.first(0) }, Ok(&[][..]));
        // SAFETY: NULL has no places.
        assert_eq!(unsafe { OutArray::NULL.put([1u32]) }, Err(Status::INVALID_VALUE));
    }

    #[test]
    fn what_is_put_is_there_and_what_is_there_is_got() {
        let mut place = 0;
        Out::from(&mut place).put(7).unwrap();
        assert_eq!(In::from(&place).get(), Ok(7));
        let both = InOut(&raw mut place, PhantomData);
        both.put(both.get().unwrap() + 1).unwrap();
        assert_eq!(place, 8);
        let text = c"text";
        let array = Array(&raw const place, PhantomData);
        assert_eq!(array.entries(Count(1u32)), Ok(&[8][..]));
        assert_eq!(Text(text.as_ptr(), PhantomData).get(), Ok(text));
    }

    #[test]
    fn an_argument_is_the_pointer_and_nothing_else() {
        assert_eq!(size_of::<Out<'_, u64>>(), size_of::<*mut u64>());
        assert_eq!(size_of::<Text<'_>>(), size_of::<*const c_char>());
    }
}
