//! Cube maps: which face a direction hits, and what lies beyond a face's edges.

/// A point on a face.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct OnFace {
    /// Index in the order +x, -x, +y, -y, +z, -z.
    pub face: u32,
    /// From 0 to 1.
    pub at: [f32; 2],
}

/// The face that a direction hits, the other two components in the face's orientation, and the largest
/// component `m`.
fn project(v: [f64; 3]) -> (u32, [f64; 2], f64) {
    let [x, y, z] = v;
    let [ax, ay, az] = v.map(f64::abs);
    // Among equal components the last one counts.
    if az >= ax && az >= ay {
        if z < 0.0 { (5, [-x, -y], az) } else { (4, [x, -y], az) }
    } else if ay >= ax {
        if y < 0.0 { (3, [x, -z], ay) } else { (2, [x, z], ay) }
    } else if x < 0.0 {
        (1, [z, -y], ax)
    } else {
        (0, [-z, -y], ax)
    }
}

/// Where a direction hits the cube. A NaN counts as zero, and a zero vector as +z.
pub(super) fn face(direction: [f32; 3]) -> OnFace {
    let (face, other, m) = project(direction.map(finite));
    let at = other.map(|c| if m == 0.0 { 0.5 } else { ((c / m + 1.0) / 2.0) as f32 });
    OnFace { face, at }
}

fn finite(v: f32) -> f64 {
    f64::from(if v.is_finite() && !v.is_subnormal() { v } else { 0.0 })
}

/// How much the point on the face moves when the direction changes by `change`.
pub(super) fn moves(direction: [f32; 3], change: [f32; 3]) -> [f64; 2] {
    let v = direction.map(finite);
    let (face, other, m) = project(v);
    if m == 0.0 {
        return [0.0; 2];
    }
    let d = change.map(f64::from);
    let axis = face as usize / 2;
    let grows = if v[axis] < 0.0 { -d[axis] } else { d[axis] };
    let across = on_face(face, d);
    [0, 1].map(|n| (across[n] * m - other[n] * grows) / (2.0 * m * m))
}

/// A vector's components along a face's two axes.
fn on_face(face: u32, [x, y, z]: [f64; 3]) -> [f64; 2] {
    match face {
        0 => [-z, -y],
        1 => [z, -y],
        2 => [x, z],
        3 => [x, -z],
        4 => [x, -y],
        _ => [-x, -y],
    }
}

/// The vector to a point on a face whose axes range from -1 to 1.
fn off_face(face: u32, [s, t]: [f64; 2], m: f64) -> [f64; 3] {
    match face {
        0 => [m, -t, -s],
        1 => [-m, -t, s],
        2 => [s, m, t],
        3 => [s, -m, -t],
        4 => [s, -t, m],
        _ => [-s, -t, -m],
    }
}

/// The face and texel beyond an edge of a face of `size` texels. `at` is outside by one in one dimension.
pub(super) fn beyond(face: u32, at: [i64; 2], size: u32) -> (u32, [u32; 2]) {
    let n = f64::from(size);
    // Texel centers in half texels from the face's center. A texel outside lies equally far below the edge on
    // the other face.
    let middle = at.map(|c| 2.0 * c as f64 + 1.0 - n);
    let (other, m) = if middle.iter().any(|c| c.abs() > n) {
        (middle.map(|c| if c.abs() > n { n.copysign(c) } else { c }), n - 1.0)
    } else {
        (middle, n)
    };
    // If a face has only one texel, that texel covers the whole edge.
    let (to, place, m) = project(off_face(face, other, m.max(0.5)));
    let texel = place.map(|c| (((c / m * n + n - 1.0) / 2.0).round()).clamp(0.0, n - 1.0) as u32);
    (to, texel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_on_a_face_and_its_vector_convert_both_ways() {
        for face in 0..6 {
            for at in [[0.25, -0.5], [-0.75, 0.125]] {
                let (found, place, m) = project(off_face(face, at, 1.0));
                assert_eq!((found, place, m), (face, at, 1.0));
            }
        }
    }

    #[test]
    fn crossing_an_edge_and_back_returns_to_the_same_texel() {
        for size in [1, 2, 5, 8] {
            for face in 0..6 {
                for along in 0..size {
                    for outside in [
                        [-1, i64::from(along)],
                        [i64::from(size), i64::from(along)],
                        [i64::from(along), -1],
                        [i64::from(along), i64::from(size)],
                    ] {
                        let (over, there) = beyond(face, outside, size);
                        assert_ne!(over, face);
                        let back = [[-1, 0], [1, 0], [0, -1], [0, 1]]
                            .map(|[dx, dy]| [i64::from(there[0]) + dx, i64::from(there[1]) + dy]);
                        let inside = outside.map(|c| c.clamp(0, i64::from(size) - 1) as u32);
                        let found = back
                            .into_iter()
                            .filter(|at| at.iter().any(|c| *c < 0 || *c >= i64::from(size)))
                            .any(|at| beyond(over, at, size) == (face, inside));
                        assert!(found, "{face} {outside:?} of {size}");
                    }
                }
            }
        }
    }
}
