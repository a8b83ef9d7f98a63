//! Pointers that a program passes to an exported function, as types that know what the function may do with
//! them.
//!
//! In memory each is a bare pointer, so exported functions have these types where C has pointers. The
//! contract of each type is what CUDA's manual requires of such an argument. The caller of the exported
//! function, which is `unsafe` for that reason, must fulfill it. The only other ways to make such a value are
//! from a reference, as NULL, and with the `unsafe` constructors here. None outlives its call, so reading and
//! writing through them is safe code. They check for NULL, which is the library's error for invalid values
//! ([`Library`]).

use std::ffi::{CStr, c_char};
use std::fmt::Debug;
use std::marker::PhantomData;

/// The library whose functions have these arguments.
pub trait Library: Copy {
    /// Its errors.
    type Error: Copy + Debug + PartialEq;
    /// The error for a NULL pointer, and for other invalid values.
    const INVALID_VALUE: Self::Error;
}

type Result<L, T = ()> = std::result::Result<T, <L as Library>::Error>;

/// # Errors
/// [`Library::INVALID_VALUE`] for a NULL pointer.
#[inline]
pub fn non_null<L: Library>(pointer: *const impl Sized) -> Result<L> {
    if pointer.is_null() { Err(L::INVALID_VALUE) } else { Ok(()) }
}

/// How many entries the arrays of a function have.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Count<N = usize>(N);

impl<N: Copy + TryInto<usize>> Count<N> {
    /// The number.
    #[inline]
    pub fn get(self) -> usize {
        // A negative number becomes the largest one, which is refused when entries are read.
        self.0.try_into().unwrap_or(usize::MAX)
    }
}

/// What the types for a pointer have in common.
macro_rules! pointers {
    ($($name:ident)*) => {$(
        impl<T, L: Library> $name<'_, T, L> {
            /// Whether it is NULL: the program gives nothing, or wants no result.
            #[inline]
            pub fn is_null(&self) -> bool {
                self.0.is_null()
            }

            /// # Errors
            /// [`Library::INVALID_VALUE`] for NULL.
            #[inline]
            pub fn required(&self) -> Result<L> {
                non_null::<L>(self.0)
            }
        }
    )*};
}

pointers! { Out In Array OutArray }

/// A place for a result: NULL, or memory in which a `T` may be written until the function returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<'a, T, L>(*mut T, PhantomData<(&'a mut T, L)>);

impl<T, L: Library> Out<'_, T, L> {
    /// No place.
    pub const NULL: Self = Out(std::ptr::null_mut(), PhantomData);

    /// Writes the result.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn put(&self, value: T) -> Result<L> {
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

impl<'a, T, L> From<&'a mut T> for Out<'a, T, L> {
    fn from(place: &'a mut T) -> Self {
        Out(place, PhantomData)
    }
}

/// A value that a function reads: NULL, or a `T` that may be read until the function returns. `T` is plain
/// data of C, for which every bit pattern that a program can have written is a value.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<'a, T, L>(*const T, PhantomData<(&'a T, L)>);

impl<T: Copy, L: Library> In<'_, T, L> {
    /// The value.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn get(&self) -> Result<L, T> {
        self.optional().ok_or(L::INVALID_VALUE)
    }

    /// The value, unless it is NULL.
    #[inline]
    pub fn optional(&self) -> Option<T> {
        // SAFETY: a value that may be read if it is not NULL, by the type's contract.
        (!self.is_null()).then(|| unsafe { self.0.read() })
    }
}

impl<'a, T, L> From<&'a T> for In<'a, T, L> {
    fn from(value: &'a T) -> Self {
        In(value, PhantomData)
    }
}

/// A value that a function reads and overwrites: NULL, or a `T` that may be read and written until the
/// function returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct InOut<'a, T, L>(*mut T, PhantomData<(&'a mut T, L)>);

impl<'a, T, L> From<&'a mut T> for InOut<'a, T, L> {
    fn from(place: &'a mut T) -> Self {
        InOut(place, PhantomData)
    }
}

impl<T: Copy, L: Library> InOut<'_, T, L> {
    /// The value as it is.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn get(&self) -> Result<L, T> {
        In::<T, L>(self.0, PhantomData).get()
    }

    /// Overwrites the value.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn put(&self, value: T) -> Result<L> {
        Out::<T, L>(self.0, PhantomData).put(value)
    }
}

/// An array that a function reads: NULL, or as many entries as the function's [`Count`], which may be read
/// until it returns.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Array<'a, T, L>(*const T, PhantomData<(&'a [T], L)>);

impl<'a, T: Copy, L: Library> Array<'a, T, L> {
    /// No array.
    pub const NULL: Self = Array(std::ptr::null(), PhantomData);

    /// Its entries. An array without entries may be NULL.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    pub fn entries<N: Copy + TryInto<usize>>(&self, count: Count<N>) -> Result<L, &'a [T]> {
        // SAFETY: as many entries as the count says, by the type's contract.
        unsafe { self.first(count.get()) }
    }

    /// Like [`entries`](Self::entries), for a function whose arrays differ in length, or that reads only the
    /// first entries.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    ///
    /// # Safety
    /// The array is NULL or has `count` entries.
    pub unsafe fn first(&self, count: usize) -> Result<L, &'a [T]> {
        if count == 0 {
            return Ok(&[]);
        }
        self.required()?;
        // No array is as long as this.
        if count > isize::MAX as usize / size_of::<T>().max(1) {
            return Err(L::INVALID_VALUE);
        }
        // SAFETY: not NULL, and as long as the caller says; readable by the type's contract.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

/// An array of places for results: NULL, or places that may be written until the function returns. Another
/// argument says how many there are.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct OutArray<'a, T, L>(*mut T, PhantomData<(&'a mut [T], L)>);

impl<T: Copy, L: Library> OutArray<'_, T, L> {
    /// No array.
    pub const NULL: Self = OutArray(std::ptr::null_mut(), PhantomData);

    /// Writes results into the first places.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    ///
    /// # Safety
    /// The array is NULL or has as many places as there are values.
    pub unsafe fn put(&self, values: impl IntoIterator<Item = T>) -> Result<L> {
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
pub struct Text<'a, L>(*const c_char, PhantomData<(&'a CStr, L)>);

impl<'a, L> From<&'a CStr> for Text<'a, L> {
    fn from(text: &'a CStr) -> Self {
        Text(text.as_ptr(), PhantomData)
    }
}

impl<'a, L: Library> Text<'a, L> {
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn required(&self) -> Result<L> {
        non_null::<L>(self.0)
    }

    /// The text.
    ///
    /// # Errors
    /// [`Library::INVALID_VALUE`] for NULL.
    #[inline]
    pub fn get(&self) -> Result<L, &'a CStr> {
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

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Invalid;

    #[derive(Clone, Copy, Debug)]
    struct Lib;

    impl Library for Lib {
        type Error = Invalid;
        const INVALID_VALUE: Invalid = Invalid;
    }

    #[test]
    fn null_is_an_invalid_value_and_nothing_is_written() {
        let nowhere = Out::<u32, Lib>(std::ptr::null_mut(), PhantomData);
        assert_eq!(nowhere.put(1), Err(Invalid));
        nowhere.put_if_wanted(1);
        assert_eq!(In::<u32, Lib>(std::ptr::null(), PhantomData).get(), Err(Invalid));
        assert!(Text::<Lib>(std::ptr::null(), PhantomData).get().is_err());
        // SAFETY: NULL has no entries.
        assert_eq!(unsafe { Array::<u32, Lib>::NULL.first(1) }, Err(Invalid));
        // SAFETY: NULL has no entries.
        assert_eq!(unsafe { Array::<u32, Lib>::NULL.first(0) }, Ok(&[][..]));
        // SAFETY: NULL has no places.
        assert_eq!(unsafe { OutArray::<u32, Lib>::NULL.put([1]) }, Err(Invalid));
    }

    #[test]
    fn values_are_written_and_read_back() {
        let mut place = 0;
        Out::<_, Lib>::from(&mut place).put(7).unwrap();
        assert_eq!(In::<_, Lib>::from(&place).get(), Ok(7));
        let both = InOut::<_, Lib>(&raw mut place, PhantomData);
        both.put(both.get().unwrap() + 1).unwrap();
        assert_eq!(place, 8);
        let text = c"text";
        let array = Array::<_, Lib>(&raw const place, PhantomData);
        assert_eq!(array.entries(Count(1u32)), Ok(&[8][..]));
        assert_eq!(Text::<Lib>(text.as_ptr(), PhantomData).get(), Ok(text));
    }

    #[test]
    fn an_argument_has_the_layout_of_a_pointer() {
        assert_eq!(size_of::<Out<'_, u64, Lib>>(), size_of::<*mut u64>());
        assert_eq!(size_of::<Text<'_, Lib>>(), size_of::<*const c_char>());
    }
}
