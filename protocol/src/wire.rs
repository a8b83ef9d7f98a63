//! How values are encoded: fields one after the other, little-endian, without padding and without type
//! information.
//!
//! [`Reader`] never panics, and allocates no more than the length of its input. Whatever a guest sends,
//! decoding returns a value or a [`WireError`].

use crate::schema::Shape;
use thiserror::Error;

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// The input ended inside a value.
    #[error("{needed} bytes needed at offset {offset}, {left} left")]
    Short {
        /// Offset of the value in the input, in bytes.
        offset: usize,
        /// Bytes that the value takes.
        needed: usize,
        /// Bytes that were left.
        left: usize,
    },
    /// Bytes were left over after the last field.
    #[error("{0} bytes left over after the last field")]
    Trailing(usize),
    /// A field has a value that its type does not allow.
    #[error("{what}: {value:#x} is not a valid value")]
    Invalid {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A string was not UTF-8.
    #[error("a string at offset {0} is not UTF-8")]
    NotUtf8(usize),
}

/// Appends values to a buffer, which the caller can reuse.
pub struct Writer<'b>(pub &'b mut Vec<u8>);

impl Writer<'_> {
    /// Appends raw bytes.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
}

/// Takes values from the front of a byte slice.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A reader at the start of `data`.
    pub fn new(data: &'a [u8]) -> Self {
        Reader { data, at: 0 }
    }

    /// The next `n` bytes.
    #[inline]
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], WireError> {
        let left = self.data.len() - self.at;
        if n > left {
            return Err(WireError::Short { offset: self.at, needed: n, left });
        }
        let bytes = &self.data[self.at..self.at + n];
        self.at += n;
        Ok(bytes)
    }

    /// The next `N` bytes, as an array.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N)?);
        Ok(out)
    }

    /// Bytes taken so far.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// Bytes not yet taken.
    pub fn left(&self) -> usize {
        self.data.len() - self.at
    }

    /// Checks that nothing is left but the zero padding (less than 16 bytes) at the end of a ring record.
    pub fn finish(self) -> Result<(), WireError> {
        let rest = &self.data[self.at..];
        if rest.len() < 16 && rest.iter().all(|b| *b == 0) {
            Ok(())
        } else {
            Err(WireError::Trailing(rest.len()))
        }
    }
}

/// A value that can cross a boundary.
pub trait Wire<'a>: Sized {
    /// Its wire form.
    const SHAPE: Shape;

    /// Whether values of this type can name bulk data that lies outside the record (see [`crate::data`]).
    const CARRIES_DATA: bool = false;

    /// Appends the value.
    fn put(&self, w: &mut Writer<'_>);

    /// Decodes a value.
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError>;

    /// Calls `visit` for every piece of bulk data that the value names, in the order of the fields.
    fn visit_data(&self, _visit: &mut dyn FnMut(crate::data::DataUse)) {}

    /// Calls `visit` for every stream and event that the value names, in field order.
    fn visit_handles(&self, _visit: &mut dyn FnMut(crate::handle::Handle)) {}
}

macro_rules! wire_int {
    ($($t:ty),*) => {$(
        impl Wire<'_> for $t {
            const SHAPE: Shape = Shape::Scalar { name: stringify!($t), bytes: size_of::<$t>() };
            #[inline]
            fn put(&self, w: &mut Writer<'_>) {
                w.bytes(&self.to_le_bytes());
            }
            #[inline]
            fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
                Ok(<$t>::from_le_bytes(r.array()?))
            }
        }
    )*};
}
wire_int!(u8, u16, u32, u64, i32, i64, f32);

impl Wire<'_> for bool {
    const SHAPE: Shape = Shape::Scalar { name: "bool", bytes: 1 };
    fn put(&self, w: &mut Writer<'_>) {
        u8::from(*self).put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        match u8::get(r)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Invalid { what: "bool", value: value.into() }),
        }
    }
}

impl<'a, T: Wire<'a>, const N: usize> Wire<'a> for [T; N] {
    const SHAPE: Shape = Shape::Array { of: &T::SHAPE, count: N };
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        self.iter().for_each(|v| v.put(w));
    }
    #[inline]
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        let mut failed = None;
        let values = std::array::from_fn(|_| match failed {
            None => T::get(r).map_err(|e| failed = Some(e)).ok(),
            Some(_) => None,
        });
        match failed {
            Some(e) => Err(e),
            None => Ok(values.map(|v| match v {
                Some(v) => v,
                None => unreachable!("every element decoded"),
            })),
        }
    }
}

/// Bytes inside the record: `u32` length, then the bytes.
impl<'a> Wire<'a> for &'a [u8] {
    const SHAPE: Shape = Shape::Bytes { name: "&[u8]" };
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        (self.len() as u32).put(w);
        w.bytes(self);
    }
    #[inline]
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        let n = u32::get(r)?;
        r.bytes(n as usize)
    }
}

/// UTF-8 text inside the record: `u32` length in bytes, then the bytes.
impl<'a> Wire<'a> for &'a str {
    const SHAPE: Shape = Shape::Bytes { name: "&str" };
    fn put(&self, w: &mut Writer<'_>) {
        self.as_bytes().put(w);
    }
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        let at = r.offset();
        std::str::from_utf8(<&[u8]>::get(r)?).map_err(|_| WireError::NotUtf8(at))
    }
}

/// An optional value: a `bool`, and if it is true the value.
impl<'a, T: Wire<'a>> Wire<'a> for Option<T> {
    const SHAPE: Shape = Shape::Optional { of: &T::SHAPE };
    const CARRIES_DATA: bool = T::CARRIES_DATA;
    fn put(&self, w: &mut Writer<'_>) {
        self.is_some().put(w);
        self.iter().for_each(|v| v.put(w));
    }
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        if bool::get(r)? { T::get(r).map(Some) } else { Ok(None) }
    }
    fn visit_data(&self, visit: &mut dyn FnMut(crate::data::DataUse)) {
        self.iter().for_each(|v| v.visit_data(visit));
    }
}

/// A list: `u32` count, then the values. Decoding allocates no more than the input can hold.
impl<'a, T: Wire<'a>> Wire<'a> for Vec<T> {
    const SHAPE: Shape = Shape::List { of: &T::SHAPE };
    const CARRIES_DATA: bool = T::CARRIES_DATA;
    fn put(&self, w: &mut Writer<'_>) {
        (self.len() as u32).put(w);
        self.iter().for_each(|v| v.put(w));
    }
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        let n = u32::get(r)? as usize;
        if n > r.left() {
            return Err(WireError::Short { offset: r.offset(), needed: n, left: r.left() });
        }
        let mut out = Vec::with_capacity(n.min(r.left() / size_of::<T>().max(1) + 1));
        for _ in 0..n {
            out.push(T::get(r)?);
        }
        Ok(out)
    }
    fn visit_data(&self, visit: &mut dyn FnMut(crate::data::DataUse)) {
        self.iter().for_each(|v| v.visit_data(visit));
    }
}

/// Owned bytes; on the wire like `&[u8]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bytes(pub Vec<u8>);

impl Wire<'_> for Bytes {
    const SHAPE: Shape = Shape::Bytes { name: "Bytes" };
    fn put(&self, w: &mut Writer<'_>) {
        self.0.as_slice().put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        <&[u8]>::get(r).map(|bytes| Bytes(bytes.to_vec()))
    }
}

/// Owned text; on the wire like `&str`.
impl Wire<'_> for String {
    const SHAPE: Shape = Shape::Bytes { name: "String" };
    fn put(&self, w: &mut Writer<'_>) {
        self.as_str().put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        <&str>::get(r).map(str::to_owned)
    }
}

/// Declares a structure whose wire form is its fields in order.
#[macro_export]
macro_rules! wire_struct {
    ($(#[$meta:meta])* $vis:vis struct $name:ident $(<$lt:lifetime>)? { $($(#[$fmeta:meta])* $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        $vis struct $name $(<$lt>)? { $($(#[$fmeta])* pub $field: $ty,)* }

        $crate::wire_struct!(@impl $name ($($lt)?) $($field: $ty),*);
    };
    (@impl $name:ident () $($field:ident: $ty:ty),*) => {
        impl<'w> $crate::wire::Wire<'w> for $name {
            $crate::wire_struct!(@body 'w $name $($field: $ty),*);
        }
    };
    (@impl $name:ident ($lt:lifetime) $($field:ident: $ty:ty),*) => {
        impl<$lt> $crate::wire::Wire<$lt> for $name<$lt> {
            $crate::wire_struct!(@body $lt $name $($field: $ty),*);
        }
    };
    (@body $lt:lifetime $name:ident $($field:ident: $ty:ty),*) => {
        const SHAPE: $crate::schema::Shape = $crate::schema::Shape::Struct {
            name: stringify!($name),
            fields: &[$($crate::schema::Field {
                name: stringify!($field),
                shape: <$ty as $crate::wire::Wire<$lt>>::SHAPE,
            }),*],
        };
        const CARRIES_DATA: bool = false $(|| <$ty as $crate::wire::Wire<$lt>>::CARRIES_DATA)*;
        #[inline]
        fn put(&self, _w: &mut $crate::wire::Writer<'_>) {
            $($crate::wire::Wire::put(&self.$field, _w);)*
        }
        #[inline]
        fn get(_r: &mut $crate::wire::Reader<$lt>) -> Result<Self, $crate::wire::WireError> {
            Ok(Self { $($field: $crate::wire::Wire::get(_r)?,)* })
        }
        fn visit_data(&self, _visit: &mut dyn FnMut($crate::data::DataUse)) {
            $($crate::wire::Wire::visit_data(&self.$field, _visit);)*
        }
        fn visit_handles(&self, _visit: &mut dyn FnMut($crate::handle::Handle)) {
            $($crate::wire::Wire::visit_handles(&self.$field, _visit);)*
        }
    };
}
