//! Tensor maps, by which kernels copy tiles of tensors.
//!
//! The 128 bytes have this GPU's own format, since NVIDIA does not document theirs. A kernel may pass
//! arbitrary bytes, so they are validated on every use.

use crate::error::{Error, Result};

/// Maximum number of dimensions.
pub(crate) const MAX_RANK: usize = 5;
/// Size of an encoded map in bytes.
const BYTES: usize = 128;
const MAGIC: u64 = u64::from_le_bytes(*b"tensor 1");

/// The element types, indexed by `CUtensorMapDataType`: PTX name, and size in bytes.
const TYPES: [(&str, u32); 10] = [
    ("u8", 1),
    ("u16", 2),
    ("u32", 4),
    ("s32", 4),
    ("u64", 8),
    ("s64", 8),
    ("f16", 2),
    ("f32", 4),
    ("f64", 8),
    ("bf16", 2),
];

/// A tensor in device memory and the tiles in which it is copied (`cuTensorMapEncodeTiled`, without
/// interleaving; elements outside the tensor read as zero).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// `CUtensorMapDataType`, up to `CU_TENSOR_MAP_DATA_TYPE_BFLOAT16`.
    pub data_type: u32,
    /// Number of dimensions, 1 to 5. The arrays below use only this many entries.
    pub rank: u32,
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Number of elements in each dimension.
    pub sizes: [u64; MAX_RANK],
    /// Bytes between elements in each dimension except the first, multiples of 16.
    pub strides: [u64; MAX_RANK - 1],
    /// Size of a tile in each dimension, 1 to 256.
    pub tile: [u32; MAX_RANK],
    /// Element step in each dimension except the first, 1 to 8: only every n-th element of the tile is
    /// copied.
    pub steps: [u32; MAX_RANK],
    /// `CUtensorMapSwizzle`, up to `CU_TENSOR_MAP_SWIZZLE_128B`: how a tile is arranged in shared memory.
    pub swizzle: u32,
}

impl TensorMap {
    /// Checks the rules of `cuTensorMapEncodeTiled`.
    fn check(&self) -> Result<()> {
        let rank = self.rank as usize;
        let refuse = |what: &str| Err(Error::InvalidArgument(format!("tensor map: {what}: {self:?}")));
        if !(1..=MAX_RANK).contains(&rank) || self.data_type as usize >= TYPES.len() || self.swizzle > 3 {
            return refuse("invalid rank, type or swizzle");
        }
        if !self.address.is_multiple_of(16) || self.address >> 56 != 0 {
            return refuse("address");
        }
        if self.sizes[..rank].iter().any(|n| *n == 0 || *n > 1 << 32) {
            return refuse("sizes");
        }
        if self.strides[..rank - 1].iter().any(|n| *n % 16 != 0 || *n >= 1 << 40) {
            return refuse("strides");
        }
        let steps = self.steps[..rank].iter().all(|n| (1..=8).contains(n));
        if !steps || self.tile[..rank].iter().any(|n| *n == 0 || *n > 256) {
            return refuse("invalid tile or steps");
        }
        let inner = self.tile[0] * self.width();
        let most = [u32::MAX, 32, 64, 128][self.swizzle as usize];
        if !inner.is_multiple_of(16) || inner > most {
            return refuse("invalid size of a tile's row");
        }
        Ok(())
    }

    /// Bytes per element.
    pub(crate) fn width(&self) -> u32 {
        TYPES[self.data_type as usize].1
    }

    /// The element's type as PTX names it.
    pub(crate) fn element(&self) -> &'static str {
        TYPES[self.data_type as usize].0
    }

    /// The number of elements that are copied in a dimension.
    pub(crate) fn count(&self, dimension: usize) -> u32 {
        // Steps do not apply to the first dimension.
        if dimension == 0 { self.tile[0] } else { self.tile[dimension].div_ceil(self.steps[dimension]) }
    }

    /// Bytes per tile.
    pub(crate) fn tile_bytes(&self) -> u64 {
        (0..self.rank as usize).fold(u64::from(self.width()), |n, d| n * u64::from(self.count(d)))
    }

    /// The swizzled form of a shared address within a tile.
    pub(crate) fn swizzled(&self, address: u64) -> u64 {
        let turns = (1u64 << self.swizzle) - 1;
        address ^ (address >> 7 & turns) << 4
    }

    /// Encodes the map for kernels.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the map is invalid.
    pub fn encode(&self) -> Result<[u8; BYTES]> {
        self.check()?;
        let mut words = [0u64; BYTES / 8];
        words[0] = MAGIC;
        words[1] = self.address;
        words[2] = u64::from(self.data_type) | u64::from(self.rank) << 8 | u64::from(self.swizzle) << 16;
        let rank = self.rank as usize;
        words[3..3 + rank].copy_from_slice(&self.sizes[..rank]);
        let packed = |list: &[u32]| list.iter().rev().fold(0, |v, n| v << 8 | u64::from(n - 1));
        words[8] = packed(&self.tile[..rank]);
        words[9] = packed(&self.steps[..rank]);
        words[10..9 + rank].copy_from_slice(&self.strides[..rank - 1]);
        let mut out = [0; BYTES];
        for (bytes, word) in out.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Ok(out)
    }

    /// Decodes a map; `None` if the bytes are not a valid one.
    pub fn decode(bytes: &[u8; BYTES]) -> Option<TensorMap> {
        let word = |n: usize| bytes[8 * n..8 * n + 8].iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        if word(0) != MAGIC {
            return None;
        }
        let field = |n: usize, d: usize| (word(n) >> (8 * d) & 255) as u32;
        let map = TensorMap {
            data_type: field(2, 0),
            rank: field(2, 1),
            address: word(1),
            sizes: std::array::from_fn(|d| word(3 + d)),
            strides: std::array::from_fn(|d| word(10 + d)),
            tile: std::array::from_fn(|d| field(8, d) + 1),
            steps: std::array::from_fn(|d| field(9, d) + 1),
            swizzle: field(2, 2),
        };
        map.check().ok()?;
        Some(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: TensorMap = TensorMap {
        data_type: 7,
        rank: 3,
        address: 0x2000_0000_0040,
        sizes: [50, 20, 1 << 32, 0, 0],
        strides: [208, 4160, 0, 0],
        tile: [32, 256, 7, 1, 1],
        steps: [1, 8, 2, 1, 1],
        swizzle: 3,
    };

    #[test]
    fn a_map_decodes_to_what_was_encoded() {
        assert_eq!(TensorMap::decode(&MAP.encode().unwrap()), Some(MAP));
        assert_eq!(MAP.tile_bytes(), 4 * 32 * 32 * 4);
    }

    #[test]
    fn invalid_maps_are_refused() {
        for wrong in [
            TensorMap { rank: 6, ..MAP },
            TensorMap { rank: 0, ..MAP },
            TensorMap { data_type: 10, ..MAP },
            TensorMap { address: 8, ..MAP },
            TensorMap { tile: [33, 1, 1, 1, 1], ..MAP },
            TensorMap { tile: [3, 1, 1, 1, 1], ..MAP },
            TensorMap { steps: [1, 9, 1, 1, 1], ..MAP },
            TensorMap { strides: [200, 4160, 0, 0], ..MAP },
        ] {
            assert!(wrong.encode().is_err(), "{wrong:?}");
        }
        assert_eq!(TensorMap::decode(&[0; 128]), None);
        let mut bytes = MAP.encode().unwrap();
        bytes[17] = 9;
        assert_eq!(TensorMap::decode(&bytes), None);
    }

    #[test]
    fn a_swizzle_moves_sixteen_byte_units() {
        assert_eq!(MAP.swizzled(0x80 + 0x13), 0x80 + 0x03);
        assert_eq!(MAP.swizzled(0x380), 0x380 + 0x70);
        assert_eq!(TensorMap { swizzle: 1, ..MAP }.swizzled(0x380), 0x390);
        assert_eq!(TensorMap { swizzle: 0, ..MAP }.swizzled(0x380), 0x380);
    }
}
