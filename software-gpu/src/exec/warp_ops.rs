//! Operations across the lanes of a warp: shuffles, votes, matches, reductions.
//!
//! Before a handler runs, the interpreter has brought together the lanes of the member mask. The handler's
//! mask contains the participating lanes.

use crate::exec::rows::{self, get, put, put_pred};
use crate::machine::program::{Handler, NONE};
use crate::machine::row::LANES;
use crate::machine::warp::Flow;

macro_rules! shuffle {
    (|$lane:ident, $b:ident, $max:ident, $min:ident, $seg:ident| ($j:expr, $valid:expr)) => {
        // `r[0]` = row `r[1]` of the lane selected by `r[2]` within the segments of `r[3]`; predicate `r[4]`.
        handler!(|w, i, m| {
            let (a, b, c): ([u32; LANES], [u32; LANES], [u32; LANES]) =
                (get(w, i.r[1]), get(w, i.r[2]), get(w, i.r[3]));
            let mut out = a;
            let mut valid = 0;
            for $lane in 0..32i32 {
                let l = $lane as usize;
                let $b = (b[l] & 31) as i32;
                let $seg = (c[l] >> 8 & 31) as i32;
                let clamp = (c[l] & 31) as i32;
                let $max = ($lane & $seg) | (clamp & !$seg);
                let $min = $lane & $seg;
                let j: i32 = $j;
                let ok = {
                    let $lane = j;
                    $valid
                };
                let j = if ok { j } else { l as i32 };
                valid |= u32::from(ok) << l;
                // A lane that does not participate contributes zero.
                out[l] = if m >> (j & 31) & 1 != 0 { a[(j & 31) as usize] } else { 0 };
            }
            if i.r[0] != NONE {
                put(w, i.r[0], m, &out);
            }
            if i.r[4] != NONE {
                put_pred(w, i.r[4], m, valid);
            }
            Flow::Next
        })
    };
}

/// `shfl.sync`, by mode.
pub(crate) fn shuffle(mode: &str) -> Option<Handler> {
    Some(match mode {
        "up" => shuffle!(|lane, b, max, min, seg| (lane - b, {
            let _ = (min, seg);
            lane >= max
        })),
        "down" => shuffle!(|lane, b, max, min, seg| (lane + b, {
            let _ = (min, seg);
            lane <= max
        })),
        "bfly" => shuffle!(|lane, b, max, min, seg| (lane ^ b, {
            let _ = (min, seg);
            lane <= max
        })),
        "idx" => shuffle!(|lane, b, max, min, seg| (min | (b & !seg), lane <= max)),
        _ => return None,
    })
}

/// `vote.sync`: predicate `r[1]`, negated if `imm` is 1; the result `r[0]` is a predicate, or 32 bits for a
/// ballot.
pub(crate) fn vote(mode: &str) -> Option<Handler> {
    macro_rules! vote {
        (|$p:ident, $m:ident| $e:expr) => {
            handler!(|w, i, $m| {
                let bits = rows::pred(w, i.r[1]);
                let $p = if i.imm == 1 { !bits } else { bits } & $m;
                put_pred(w, i.r[0], $m, if $e { u32::MAX } else { 0 });
                Flow::Next
            })
        };
    }
    Some(match mode {
        "all" => vote!(|p, m| p == m),
        "any" => vote!(|p, m| p != 0),
        "uni" => vote!(|p, m| p == m || p == 0),
        "ballot" => handler!(|w, i, m| {
            let bits = rows::pred(w, i.r[1]);
            let p = if i.imm == 1 { !bits } else { bits } & m;
            put(w, i.r[0], m, &[p; LANES]);
            Flow::Next
        }),
        _ => return None,
    })
}

/// `activemask`.
pub(crate) const ACTIVEMASK: Handler = handler!(|w, i, m| {
    put(w, i.r[0], m, &[m; LANES]);
    Flow::Next
});

/// `elect.sync`: `r[0]` is the leader's lane or NONE, predicate `r[1]` is true in the leader.
pub(crate) const ELECT: Handler = handler!(|w, i, m| {
    let leader = m.trailing_zeros();
    if i.r[0] != NONE {
        put(w, i.r[0], m, &[leader; LANES]);
    }
    put_pred(w, i.r[1], m, 1 << leader);
    Flow::Next
});

macro_rules! matches {
    ($t:ty, $all:expr) => {
        // `r[0]` is the mask, `r[2]` the predicate for `all`, `r[1]` the value.
        handler!(|w, i, m| {
            let v: [$t; LANES] = get(w, i.r[1]);
            let mut out = [0u32; LANES];
            for l in 0..LANES {
                for k in 0..LANES {
                    out[l] |= u32::from(v[k] == v[l] && m >> k & 1 != 0) << k;
                }
            }
            if $all {
                let same = out[m.trailing_zeros() as usize & 31] == m;
                let value = if same { m } else { 0 };
                if i.r[2] != NONE {
                    put_pred(w, i.r[2], m, if same { u32::MAX } else { 0 });
                }
                out = [value; LANES];
            }
            put(w, i.r[0], m, &out);
            Flow::Next
        })
    };
}

/// `match.sync`, by mode and type.
pub(crate) fn matching(mode: &str, ty: &str) -> Option<Handler> {
    Some(match (mode, ty) {
        ("any", "b32") => matches!(u32, false),
        ("any", "b64") => matches!(u64, false),
        ("all", "b32") => matches!(u32, true),
        ("all", "b64") => matches!(u64, true),
        _ => return None,
    })
}

/// `redux.sync`, by operation and type.
pub(crate) fn redux(op: &str, ty: &str) -> Option<Handler> {
    macro_rules! redux {
        ($t:ty, $init:expr, $f:expr) => {
            handler!(|w, i, m| {
                let v: [$t; LANES] = get(w, i.r[1]);
                let mut sum: $t = $init;
                for l in 0..LANES {
                    if m >> l & 1 != 0 {
                        sum = $f(sum, v[l]);
                    }
                }
                put(w, i.r[0], m, &[sum; LANES]);
                Flow::Next
            })
        };
    }
    Some(match (op, ty) {
        ("add", "u32" | "s32") => redux!(u32, 0, u32::wrapping_add),
        ("min", "u32") => redux!(u32, u32::MAX, u32::min),
        ("max", "u32") => redux!(u32, 0, u32::max),
        ("min", "s32") => redux!(i32, i32::MAX, i32::min),
        ("max", "s32") => redux!(i32, i32::MIN, i32::max),
        ("and", "b32") => redux!(u32, u32::MAX, |a, b| a & b),
        ("or", "b32") => redux!(u32, 0, |a, b| a | b),
        ("xor", "b32") => redux!(u32, 0, |a, b| a ^ b),
        _ => return None,
    })
}
