//! Descriptions of the wire: shapes of values, layouts of structures, and named numbers.
//!
//! [`crate::version`] hashes these descriptions into the fingerprint at compile time, `tests/snapshot.rs`
//! writes them into the committed snapshot, and `tests/docs.rs` into `docs/wire.md`. Every item says in which
//! minor version it appeared (`since`), so that a build can tell what an older peer knows.

use std::fmt;

/// The wire form of a value ([`crate::wire::Wire`]).
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// A number or a handle.
    Scalar {
        /// Its type.
        name: &'static str,
        /// Its size in bytes.
        bytes: usize,
    },
    /// Bytes or UTF-8 text behind a `u32` length.
    Bytes {
        /// Its type.
        name: &'static str,
    },
    /// A fixed number of values.
    Array {
        /// Their shape.
        of: &'static Shape,
        /// How many.
        count: usize,
    },
    /// Values behind a `u32` count.
    List {
        /// Their shape.
        of: &'static Shape,
    },
    /// A byte, 0 or 1, and with 1 a value.
    Optional {
        /// The value's shape.
        of: &'static Shape,
    },
    /// Fields in order, without padding.
    Struct {
        /// Its name.
        name: &'static str,
        /// Its fields.
        fields: &'static [Field],
    },
    /// A reference to bulk data ([`crate::data`]), with the numbers that determine its encoding.
    Data {
        /// Its type.
        name: &'static str,
        /// Its minimum size in bytes.
        at_least: usize,
    },
}

/// A field of a wire structure, a request or a reply.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Shape,
}

impl Shape {
    /// The fields of a structure; none for everything else.
    pub const fn fields(&self) -> &'static [Field] {
        match self {
            Shape::Struct { fields, .. } => fields,
            _ => &[],
        }
    }

    /// The minimum size in bytes, and whether it is always this size.
    pub fn size(&self) -> (usize, bool) {
        match self {
            Shape::Scalar { bytes, .. } => (*bytes, true),
            Shape::Bytes { .. } | Shape::List { .. } => (4, false),
            Shape::Optional { .. } => (1, false),
            Shape::Data { at_least, .. } => (*at_least, false),
            Shape::Array { of, count } => {
                let (bytes, fixed) = of.size();
                (bytes * count, fixed)
            }
            Shape::Struct { fields, .. } => fields.iter().fold((0, true), |(sum, all_fixed), field| {
                let (bytes, fixed) = field.shape.size();
                (sum + bytes, all_fixed && fixed)
            }),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Scalar { name, .. }
            | Shape::Bytes { name }
            | Shape::Struct { name, .. }
            | Shape::Data { name, .. } => f.write_str(name),
            Shape::Array { of, count } => write!(f, "[{of}; {count}]"),
            Shape::List { of } => write!(f, "Vec<{of}>"),
            Shape::Optional { of } => write!(f, "Option<{of}>"),
        }
    }
}

/// Where the fields of a structure in memory or in a frame lie.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// The structure's name.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Its fields.
    pub fields: &'static [LayoutField],
    /// The minor version in which it appeared.
    pub since: u16,
}

/// A field of a [`Layout`].
#[derive(Debug, Clone, Copy)]
pub struct LayoutField {
    /// Its name.
    pub name: &'static str,
    /// Its type, as it stands in the source.
    pub type_name: &'static str,
    /// Its offset in bytes.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
}

/// Numbers that belong together: kinds, statuses, flags, limits.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// What they are.
    pub name: &'static str,
    /// The numbers.
    pub values: &'static [Number],
}

/// A number with a name.
#[derive(Debug, Clone, Copy)]
pub struct Number {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// The minor version in which it appeared.
    pub since: u16,
}

/// An FNV-1a hash of descriptions, computed at compile time.
#[derive(Clone, Copy)]
pub(crate) struct Hash(u64);

impl Hash {
    pub(crate) const fn new() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) const fn finish(self) -> u64 {
        self.0
    }

    const fn byte(self, byte: u8) -> Hash {
        Hash((self.0 ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
    }

    const fn bytes(mut self, bytes: &[u8]) -> Hash {
        let mut at = 0;
        while at < bytes.len() {
            self = self.byte(bytes[at]);
            at += 1;
        }
        self
    }

    pub(crate) const fn number(self, number: u64) -> Hash {
        self.bytes(&number.to_le_bytes())
    }

    pub(crate) const fn text(self, text: &str) -> Hash {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    const fn shape(self, shape: &Shape) -> Hash {
        match shape {
            Shape::Scalar { name, bytes } => self.byte(0).text(name).number(*bytes as u64),
            Shape::Bytes { name } => self.byte(1).text(name),
            Shape::Array { of, count } => self.byte(2).number(*count as u64).shape(of),
            Shape::List { of } => self.byte(3).shape(of),
            Shape::Optional { of } => self.byte(4).shape(of),
            Shape::Struct { name, fields } => self.byte(5).text(name).fields(fields),
            Shape::Data { name, at_least } => self.byte(6).text(name).number(*at_least as u64),
        }
    }

    pub(crate) const fn fields(mut self, fields: &[Field]) -> Hash {
        self = self.number(fields.len() as u64);
        let mut at = 0;
        while at < fields.len() {
            self = self.text(fields[at].name).shape(&fields[at].shape);
            at += 1;
        }
        self
    }

    pub(crate) const fn layout(mut self, layout: &Layout) -> Hash {
        self = self.text(layout.name).number(layout.size as u64);
        let mut at = 0;
        while at < layout.fields.len() {
            let field = &layout.fields[at];
            self = self.text(field.name).number(field.offset as u64).number(field.size as u64);
            at += 1;
        }
        self
    }

    /// Hashes the numbers that exist in the minor version.
    pub(crate) const fn numbers(mut self, numbers: &Numbers, minor: u16) -> Hash {
        let mut at = 0;
        while at < numbers.values.len() {
            let number = &numbers.values[at];
            if number.since <= minor {
                self = self.text(numbers.name).text(number.name).number(number.value);
            }
            at += 1;
        }
        self
    }
}

/// Declares structures that cross a boundary as they lie in memory, and `LAYOUTS`, their descriptions.
macro_rules! layouts {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident $(since $since:literal)? {
            $($(#[$field_meta:meta])* pub $field:ident: $ty:ty),* $(,)?
        }
    )*) => {
        $(
            $(#[$meta])*
            #[derive(
                Debug, Clone, Copy, PartialEq, Eq,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            #[repr(C)]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $ty),*
            }
        )*

        /// The layouts of this module's structures.
        pub const LAYOUTS: &[$crate::schema::Layout] = &[
            $($crate::schema::layout_of!($name $(since $since)? { $($field: $ty),* })),*
        ];
    };
}
pub(crate) use layouts;

/// Describes a structure by the types of its fields. Plain numbers may stand for atomics.
macro_rules! layout_of {
    ($name:ident $(since $since:literal)? { $($field:ident: $ty:ty),* $(,)? }) => {
        $crate::schema::Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$($crate::schema::LayoutField {
                name: stringify!($field),
                type_name: stringify!($ty),
                offset: std::mem::offset_of!($name, $field),
                size: size_of::<$ty>(),
            }),*],
            since: 0 $(+ $since)?,
        }
    };
}
pub(crate) use layout_of;

/// Declares modules of constants, and `NUMBERS`, their descriptions.
macro_rules! numbers {
    ($(
        $(#[$meta:meta])*
        pub mod $module:ident: $ty:ty {
            $($(#[$value_meta:meta])* $name:ident = $value:expr $(, since $since:literal)?;)*
        }
    )*) => {
        $(
            $(#[$meta])*
            pub mod $module {
                $($(#[$value_meta])* pub const $name: $ty = $value;)*
            }
        )*

        /// The named numbers of this module.
        pub const NUMBERS: &[$crate::schema::Numbers] = &[
            $($crate::schema::Numbers {
                name: stringify!($module),
                values: &[$($crate::schema::Number {
                    name: stringify!($name),
                    value: $module::$name as u64,
                    since: 0 $(+ $since)?,
                }),*],
            }),*
        ];
    };
}
pub(crate) use numbers;

/// Declares an enumeration whose values have numbers.
macro_rules! numbered {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $($(#[$variant_meta:meta])* $variant:ident = $value:literal $(since $since:literal)?),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$variant_meta])* $variant = $value),*
        }

        impl $name {
            /// All values, by name and number.
            pub const NUMBERS: $crate::schema::Numbers = $crate::schema::Numbers {
                name: stringify!($name),
                values: &[$($crate::schema::Number {
                    name: stringify!($variant),
                    value: $value,
                    since: 0 $(+ $since)?,
                }),*],
            };

            /// The value with this number.
            pub const fn with_number(number: u32) -> Option<$name> {
                match number {
                    $($value => Some($name::$variant),)*
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use numbered;
