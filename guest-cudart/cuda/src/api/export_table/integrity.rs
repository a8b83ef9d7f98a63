//! The compatibility check of NVIDIA's runtime library: it asks the driver for a keyed hash of facts that
//! both can see, and continues only if its own hash is the same.
//!
//! The hash is HMAC (RFC 2104) over MD2 (RFC 1319), with a fixed key. It covers what this API itself reports:
//! the driver's version, the process, the tables' addresses, and each device's UUID and PCI address.

/// MD2's substitution table, from the digits of pi (RFC 1319, 3.2).
const S: [u8; 256] = [
    41, 46, 67, 201, 162, 216, 124, 1, 61, 54, 84, 161, 236, 240, 6, 19, 98, 167, 5, 243, 192, 199, 115, 140,
    152, 147, 43, 217, 188, 76, 130, 202, 30, 155, 87, 60, 253, 212, 224, 22, 103, 66, 111, 24, 138, 23, 229,
    18, 190, 78, 196, 214, 218, 158, 222, 73, 160, 251, 245, 142, 187, 47, 238, 122, 169, 104, 121, 145, 21,
    178, 7, 63, 148, 194, 16, 137, 11, 34, 95, 33, 128, 127, 93, 154, 90, 144, 50, 39, 53, 62, 204, 231, 191,
    247, 151, 3, 255, 25, 48, 179, 72, 165, 181, 209, 215, 94, 146, 42, 172, 86, 170, 198, 79, 184, 56, 210,
    150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4, 241, 69, 157, 112, 89, 100, 113, 135, 32, 134, 91,
    207, 101, 230, 45, 168, 2, 27, 96, 37, 173, 174, 176, 185, 246, 28, 70, 97, 105, 52, 64, 126, 15, 85, 71,
    163, 35, 221, 81, 175, 58, 195, 92, 249, 206, 186, 197, 234, 38, 44, 83, 13, 110, 133, 40, 132, 9, 211,
    223, 205, 244, 65, 129, 77, 82, 106, 220, 55, 200, 108, 193, 171, 250, 36, 225, 123, 8, 12, 189, 177, 74,
    120, 136, 149, 139, 227, 99, 232, 109, 233, 203, 213, 254, 59, 0, 29, 57, 242, 239, 183, 14, 102, 88,
    208, 228, 166, 119, 114, 248, 235, 117, 75, 10, 49, 68, 80, 180, 143, 237, 31, 26, 219, 153, 141, 51,
    159, 17, 131, 20,
];

/// MD2 of a message.
fn md2(message: &[u8]) -> [u8; 16] {
    let pad = 16 - message.len() % 16;
    let mut padded = message.to_vec();
    padded.resize(message.len() + pad, pad as u8);
    let mut checksum = [0u8; 16];
    let mut last = 0;
    for block in padded.chunks_exact(16) {
        for (sum, byte) in checksum.iter_mut().zip(block) {
            *sum ^= S[usize::from(byte ^ last)];
            last = *sum;
        }
    }
    padded.extend(checksum);
    let mut state = [0u8; 48];
    for block in padded.chunks_exact(16) {
        for i in 0..16 {
            state[16 + i] = block[i];
            state[32 + i] = state[i] ^ block[i];
        }
        let mut t = 0u8;
        for round in 0..18u8 {
            for byte in &mut state {
                *byte ^= S[usize::from(t)];
                t = *byte;
            }
            t = t.wrapping_add(round);
        }
    }
    std::array::from_fn(|i| state[i])
}

const KEY: [u8; 16] =
    [0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52, 0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F];

/// HMAC over MD2. The key has the length of MD2's block.
fn hmac(message: &[u8]) -> [u8; 16] {
    let inner: Vec<u8> = KEY.iter().map(|byte| byte ^ 0x36).chain(message.iter().copied()).collect();
    let outer: Vec<u8> = KEY.iter().map(|byte| byte ^ 0x5c).chain(md2(&inner)).collect();
    md2(&outer)
}

/// A device as the check sees it.
pub(crate) struct Seen {
    pub uuid: [u8; 16],
    /// Domain, bus, device.
    pub pci: [i32; 3],
}

/// The question, and the process's facts that enter the hash.
pub(crate) struct Question {
    pub driver_version: i32,
    pub version: u32,
    pub process: u32,
    pub thread: u32,
    /// Addresses: the runtime's table, the check's own table, the check's function.
    pub addresses: [usize; 3],
    pub unix_seconds: u64,
}

/// The answer.
pub(crate) fn answer(question: &Question, devices: &[Seen]) -> [u64; 2] {
    // Two of ten versions have a fixed answer.
    match question.version % 10 {
        0 => return [0x3341_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
        1 => return [0x1841_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
        _ => {}
    }
    let mut message = Vec::new();
    message.extend(question.driver_version.to_le_bytes());
    for word in [question.version, question.process, question.thread] {
        message.extend(word.to_le_bytes());
    }
    for address in question.addresses {
        message.extend((address as u64).to_le_bytes());
    }
    message.extend(question.unix_seconds.to_le_bytes());
    for device in devices {
        message.extend(device.uuid);
        message.extend(device.pci.iter().flat_map(|number| number.to_le_bytes()));
    }
    let hash = u128::from_le_bytes(hmac(&message));
    [hash as u64, (hash >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: [u8; 16]) -> String {
        format!("{:032x}", u128::from_be_bytes(bytes))
    }

    #[test]
    fn md2_matches_rfc_1319() {
        // The test suite of appendix A.5.
        assert_eq!(hex(md2(b"")), "8350e5a3e24c153df2275c9f80692773");
        assert_eq!(hex(md2(b"abc")), "da853b0d3f88d99b30283a69e6ded6bb");
        assert_eq!(hex(md2(b"message digest")), "ab4f496bfb2a530b219ff33031fe06b0");
        let digits = b"12345678901234567890123456789012345678901234567890123456789012345678901234567890";
        assert_eq!(hex(md2(digits)), "d5976f79d83d3a0dc9806c3c66f3efd8");
    }
}
