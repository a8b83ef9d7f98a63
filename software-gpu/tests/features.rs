//! Less common CUDA features in programs compiled by nvcc: tensor cores, asynchronous copies, cooperative
//! groups.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params, shape};
use software_gpu::{AddressMode, ChannelFormat, Image, LaunchConfig, Module, Sampler};

fn both(test: impl Fn(&Bench, &Module)) {
    for text in
        [include_bytes!("ptx/features.ptx").as_slice(), include_bytes!("ptx/features.O0.ptx").as_slice()]
    {
        let bench = Bench::new();
        let module = bench.gpu.load_module(text).unwrap();
        test(&bench, &module);
    }
}

/// The f16 of a small integer.
fn half(n: i32) -> u16 {
    let a = n.unsigned_abs();
    let sign = if n < 0 { 0x8000 } else { 0 };
    if a == 0 {
        return sign;
    }
    let e = a.ilog2();
    sign | ((e + 15) << 10 | (a << (10 - e) & 0x3ff)) as u16
}

#[test]
fn wmma_of_f16_is_the_matrix_product() {
    both(|b, m| {
        let n = 48usize;
        let (x, y): (Vec<i32>, Vec<i32>) =
            (0..n * n).map(|i| ((i * 7 % 11) as i32 - 5, (i * 5 % 13) as i32 - 6)).unzip();
        let bits = |v: &[i32]| v.iter().map(|&n| half(n)).collect::<Vec<u16>>();
        let (da, db, dd) = (b.upload(&bits(&x)), b.upload(&bits(&y)), b.upload(&vec![0f32; n * n]));
        let p = Params::default().u64(dd).u64(da).u64(db).i32(n as i32);
        b.run(m, "wmma_halves", shape([3, 3, 1], [32, 1, 1]), &p.0).unwrap();
        let got: Vec<f32> = b.download(dd, n * n);
        for row in 0..n {
            for col in 0..n {
                let want: i32 = (0..n).map(|k| x[row * n + k] * y[col * n + k]).sum();
                assert_eq!(got[row * n + col], (want * 2) as f32, "row {row} column {col}");
            }
        }
    });
}

#[test]
fn f64_products_are_chains_of_fused_additions() {
    both(|b, m| {
        let value = |i: usize| ((i * 37 % 101) as f64 - 50.0) / 7.0 * 2f64.powi((i * 13 % 9) as i32 * 4 - 16);
        let (x, y): (Vec<f64>, Vec<f64>) = (0..256).map(|i| (value(i), value(3 * i + 1))).unzip();
        let (da, db, dd) = (b.upload(&x), b.upload(&y), b.upload(&[0f64; 128]));
        let p = Params::default().u64(dd).u64(da).u64(db).i32(16);
        b.run(m, "wmma_doubles", LaunchConfig::linear(1, 32), &p.0).unwrap();
        let want: Vec<f64> = (0..64)
            .map(|n| (0..16).fold(0.5, |sum, k| x[n / 8 * 16 + k].mul_add(y[n % 8 * 16 + k], sum)))
            .collect();
        assert_eq!(b.download::<f64>(dd, 64), want);
        let p = Params::default().u64(dd).u64(da).u64(db);
        b.run(m, "mma_doubles", LaunchConfig::linear(1, 32), &p.0).unwrap();
        let want: Vec<f64> = (0..128)
            .map(|n| (0..16).fold(0.0, |sum, k| x[n / 8 * 16 + k].mul_add(y[k * 8 + n % 8], sum)))
            .collect();
        assert_eq!(b.download::<f64>(dd, 128), want);
    });
}

#[test]
fn tiles_of_several_warps_use_reserved_shared_memory() {
    both(|b, m| {
        let data: Vec<i32> = (0..1024).map(|i| i * 31 % 97).collect();
        let (out, input) = (b.upload(&[0i32; 1024]), b.upload(&data));
        let p = Params::default().u64(out).u64(input);
        b.run(m, "wide_tiles", LaunchConfig::linear(4, 256), &p.0).unwrap();
        let want: Vec<i32> = data.chunks(128).flat_map(|tile| vec![tile.iter().sum::<i32>(); 128]).collect();
        assert_eq!(b.download::<i32>(out, 1024), want);
    });
}

#[test]
fn sixteen_byte_accesses_are_atomic() {
    both(|b, m| {
        let (cells, torn) = (b.upload(&[0u64; 128]), b.upload(&[0u32]));
        let p = Params::default().u64(cells).u64(torn).i32(100_000);
        b.run(m, "pairs", LaunchConfig::linear(8, 64), &p.0).unwrap();
        assert_eq!(b.download::<u32>(torn, 1), [0]);
    });
}

#[test]
fn wmma_of_bytes_is_the_matrix_product() {
    both(|b, m| {
        let x: Vec<i8> = (0..32 * 16).map(|i| (i * 37 % 251) as u8 as i8).collect();
        let y: Vec<i8> = (0..16 * 8).map(|i| (i * 91 % 253) as u8 as i8).collect();
        let (da, db, dd) = (b.upload(&x), b.upload(&y), b.upload(&[0i32; 32 * 8]));
        let p = Params::default().u64(dd).u64(da).u64(db);
        b.run(m, "wmma_bytes", LaunchConfig::linear(1, 32), &p.0).unwrap();
        let got: Vec<i32> = b.download(dd, 32 * 8);
        for row in 0..32 {
            for col in 0..8 {
                let want: i32 = (0..16).map(|k| i32::from(x[k * 32 + row]) * i32::from(y[k * 8 + col])).sum();
                assert_eq!(got[col * 32 + row], want + 1, "row {row} column {col}");
            }
        }
    });
}

#[test]
fn ldmatrix_feeds_mma() {
    both(|b, m| {
        let x: Vec<i32> = (0..256).map(|i| i * 7 % 11 - 5).collect();
        let y: Vec<i32> = (0..128).map(|i| i * 5 % 13 - 6).collect();
        let bits = |v: &[i32]| v.iter().map(|&n| half(n)).collect::<Vec<u16>>();
        let (da, db, dd) = (b.upload(&bits(&x)), b.upload(&bits(&y)), b.upload(&[0f32; 128]));
        let p = Params::default().u64(dd).u64(da).u64(db);
        b.run(m, "ldmatrix_mma", LaunchConfig::linear(1, 32), &p.0).unwrap();
        let got: Vec<f32> = b.download(dd, 128);
        for row in 0..16 {
            for col in 0..8 {
                let want: i32 = (0..16).map(|k| x[row * 16 + k] * y[col * 16 + k]).sum();
                assert_eq!(got[row * 8 + col], want as f32, "row {row} column {col}");
            }
        }
    });
}

#[test]
fn asynchronous_copies_arrive() {
    both(|b, m| {
        let n = 5;
        let x: Vec<i32> = (0..n * 256).collect();
        let (dx, dr) = (b.upload(&x), b.upload(&[0i32; 64]));
        let p = Params::default().u64(dr).u64(dx).i32(n);
        b.run(m, "pipeline", LaunchConfig::linear(1, 64), &p.0).unwrap();
        let want: Vec<i32> = (0..64)
            .map(|t| {
                (0..n)
                    .map(|i| (0..4).map(|k| (k + 1) * x[(i * 256 + (63 - t) * 4 + k) as usize]).sum::<i32>())
                    .sum()
            })
            .collect();
        assert_eq!(b.download::<i32>(dr, 64), want);
    });
}

#[test]
fn mbarriers_hand_data_from_producers_to_consumers() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 96]);
        let rounds = 20;
        b.run(m, "barriers", LaunchConfig::linear(1, 96), &Params::default().u64(dr).i32(rounds).0).unwrap();
        let got: Vec<i32> = b.download(dr, 96);
        for t in 0..96 {
            let want: i32 = if t < 32 { 0 } else { (0..rounds).map(|r| r * 100 + (t + r) % 32).sum() };
            assert_eq!(got[t as usize], want, "thread {t}");
        }
    });
}

#[test]
fn a_cooperative_grid_synchronizes() {
    both(|b, m| {
        let (blocks, threads, rounds) = (6usize, 64usize, 4);
        let n = blocks * threads;
        let mut want: Vec<i32> = (0..n as i32).map(|i| i % 7).collect();
        let (dd, dt) = (b.upload(&want), b.upload(&[0i32; 3]));
        for _ in 0..rounds {
            want = (0..n).map(|i| want[i] + want[(i + 1) % n]).collect();
        }
        let config =
            LaunchConfig { cooperative: true, ..LaunchConfig::linear(blocks as u32, threads as u32) };
        b.run(m, "grid_sync", config, &Params::default().u64(dd).u64(dt).i32(rounds).0).unwrap();
        assert_eq!(b.download::<i32>(dd, n), want);
        let total: Vec<i32> = b.download(dt, 3);
        let warps = (n / 32) as i32;
        assert_eq!(total, [want.iter().sum(), n.div_ceil(3) as i32, warps]);
    });
}

#[test]
fn blocks_can_wait_for_earlier_blocks() {
    both(|b, m| {
        let (blocks, threads) = (40usize, 128usize);
        let x: Vec<i32> = (0..(blocks * threads) as i32).map(|i| i * 31 % 17).collect();
        let (dx, dr) = (b.upload(&x), b.upload(&vec![0i32; x.len()]));
        let (ds, dt) = (b.upload(&vec![-1i32; blocks]), b.upload(&[0u32]));
        let p = Params::default().u64(dr).u64(dx).u64(ds).u64(dt);
        b.run(m, "look_back", LaunchConfig::linear(blocks as u32, threads as u32), &p.0).unwrap();
        let want: Vec<i32> = x
            .iter()
            .scan(0, |s, v| {
                *s += v;
                Some(*s)
            })
            .collect();
        assert_eq!(b.download::<i32>(dr, x.len()), want);
    });
}

#[test]
fn named_barriers_synchronize_some_of_the_threads() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 128]);
        b.run(m, "named_barriers", LaunchConfig::linear(1, 128), &dr.to_le_bytes()).unwrap();
        let want: Vec<i32> = (0..128).map(|t| if t < 64 { 63 - t } else { 1127 - t }).collect();
        assert_eq!(b.download::<i32>(dr, 128), want);
    });
}

#[test]
fn a_shuffle_reached_at_two_instructions_is_one_shuffle() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 96]);
        b.run(m, "divergent_shuffles", LaunchConfig::linear(1, 32), &dr.to_le_bytes()).unwrap();
        let got: Vec<i32> = b.download(dr, 96);
        for t in 0..32i32 {
            let other = (t ^ 1) * (t ^ 1) + if t & 1 == 0 { 0 } else { 5 };
            assert_eq!(got[t as usize], other + if t & 1 == 1 { 1000 } else { 2000 }, "thread {t}");
            let peers = (0..32).filter(|k| k % 5 == t % 5);
            assert_eq!(got[32 + t as usize], peers.clone().sum::<i32>(), "sum of the peers of {t}");
            assert_eq!(got[64 + t as usize], peers.filter(|k| *k > 15).count() as i32, "ballot of {t}");
        }
    });
}

#[test]
fn alloca_gives_each_thread_its_own() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 64]);
        b.run(m, "stack", LaunchConfig::linear(1, 64), &dr.to_le_bytes()).unwrap();
        let want: Vec<i32> = (0..64)
            .map(|t| {
                let n = t % 7 + 1;
                (0..n).map(|i| (i * 3) % n * t).sum()
            })
            .collect();
        assert_eq!(b.download::<i32>(dr, 64), want);
    });
}

#[test]
fn atomics_on_pairs_vectors_and_bf16() {
    both(|b, m| {
        let (pairs, four, brain) = (b.upload(&[0u32]), b.upload(&[0f32; 4]), b.upload(&[0u16, 0xabcd]));
        let p = Params::default().u64(pairs).u64(four).u64(brain);
        b.run(m, "half_atomics", LaunchConfig::linear(2, 64), &p.0).unwrap();
        assert_eq!(b.download::<u32>(pairs, 1)[0], u32::from(half(128)) | u32::from(half(256)) << 16);
        assert_eq!(b.download::<f32>(four, 4), [128.0, 256.0, 384.0, 512.0]);
        assert_eq!(b.download::<u16>(brain, 2), [(64f32.to_bits() >> 16) as u16, 0xabcd]);
    });
}

#[test]
fn compare_and_swap_of_128_bits_loses_nothing() {
    both(|b, m| {
        let at = b.upload(&[0u64; 2]);
        b.run(m, "wide_cas", LaunchConfig::linear(4, 64), &at.to_le_bytes()).unwrap();
        assert_eq!(b.download::<u64>(at, 2), [256, 768]);
    });
}

#[test]
fn printf_formats_as_c_does() {
    both(|b, m| {
        b.run(m, "formats", LaunchConfig::linear(1, 1), &42i32.to_le_bytes()).unwrap();
        let printed = String::from_utf8(b.printed.lock().unwrap().clone()).unwrap();
        assert_eq!(
            printed,
            "  abc|de   |fg|+42| 42|00042|ffffffd6|0x2a|052|    42|6.00\n\
             6.300000e+01|14|4.2E-09|1e+20|0x1p+0|42|46179488366592|ffffffffffffffff|Q|%|2.500000| 1.235e+04|\n"
        );
    });
}

fn image(address: u64, size: [u32; 3], format: ChannelFormat, channels: u32) -> Image {
    let row = u64::from(size[0] * channels * format.bits() / 8);
    let slice_pitch = row * u64::from(size[1]);
    Image { address, size, layers: 1, row_pitch: row, slice_pitch, format, channels }
}

fn sampler(address: AddressMode, linear: bool, normalized: bool) -> Sampler {
    Sampler { address: [address; 3], linear, normalized, ..Sampler::default() }
}

#[test]
fn textures_are_fetched_filtered_and_wrapped() {
    both(|b, m| {
        let flat: Vec<f32> = (0..32).map(|i| i as f32 * 1.5).collect();
        let plane: Vec<f32> = (0..8 * 6).map(|i| (i * i % 19) as f32).collect();
        let volume: Vec<u8> = (0..8 * 4 * 2).map(|i| (i * 11 % 256) as u8).collect();
        let layers: Vec<i16> = (0..4 * 4 * 2 * 2).map(|i| i - 20).collect();
        let float = ChannelFormat::Float(32);
        let nearest = sampler(AddressMode::Clamp, false, false);
        let linear = sampler(AddressMode::Clamp, true, false);
        let wrapped = Sampler { normalized_read: true, ..sampler(AddressMode::Wrap, false, true) };
        let bytes = ChannelFormat::Unsigned(8);
        let words = Image { layers: 2, ..image(b.upload(&layers), [4, 4, 1], ChannelFormat::Signed(16), 2) };
        let handles = [
            b.gpu.create_texture(image(b.upload(&flat), [32, 1, 1], float, 1), nearest),
            b.gpu.create_texture(image(b.upload(&plane), [8, 6, 1], float, 1), linear),
            b.gpu.create_texture(image(b.upload(&volume), [8, 4, 2], bytes, 1), wrapped),
            b.gpu.create_texture(words, Sampler { normalized_read: true, ..nearest }),
        ];
        let out = b.upload(&[0f32; 160]);
        let p = handles.iter().fold(Params::default().u64(out), |p, h| p.u64(*h.as_ref().unwrap()));
        b.run(m, "textures", LaunchConfig::linear(1, 32), &p.0).unwrap();
        let got: Vec<f32> = b.download(out, 160);
        let at = |x: i32, y: i32| plane[(y.clamp(0, 5) * 8 + x.clamp(0, 7)) as usize];
        for t in 0..32usize {
            assert_eq!(got[t], flat[t]);
            let (x, y) = (t as f32 * 0.37 - 3.0, t as f32 * 0.21 - 1.0);
            let (fx, fy) = (x - 0.5, y - 0.5);
            let (ix, iy) = (fx.floor() as i32, fy.floor() as i32);
            let (a, c) = (fx - fx.floor(), fy - fy.floor());
            let low = at(ix, iy) * (1.0 - a) + at(ix + 1, iy) * a;
            let high = at(ix, iy + 1) * (1.0 - a) + at(ix + 1, iy + 1) * a;
            let want = low * (1.0 - c) + high * c;
            // Weights have eight bits.
            assert!((got[32 + t] - want).abs() < 0.2, "({x}, {y}): {} and {want}", got[32 + t]);
            let index = |v: f32, n: i32| ((v * n as f32).floor() as i32).rem_euclid(n) as usize;
            let (vx, vy, vz) = (index(x / 8.0, 8), index(y / 4.0, 4), index(t as f32 / 32.0, 2));
            assert_eq!(got[64 + t], f32::from(volume[vz * 32 + vy * 8 + vx]) / 255.0, "volume at {t}");
            let texel = (t % 2 * 16 + t / 4 % 4 * 4 + t % 4) * 2;
            let of = |n: usize| f32::from(layers[n]) / 32767.0;
            assert!((got[96 + t] - (of(texel) * 100.0 + of(texel + 1))).abs() < 1e-5);
            assert_eq!(got[128 + t], at(1, 2));
        }
    });
}

#[test]
fn surfaces_are_read_and_written_by_bytes() {
    both(|b, m| {
        let from: Vec<u8> = (0..10 * 3 * 4).map(|i| (i * 7 % 251) as u8).collect();
        let (src, dst) = (b.upload(&from), b.upload(&vec![0i32; 10 * 3 * 2]));
        let read = b.gpu.create_surface(image(src, [10, 3, 1], ChannelFormat::Unsigned(8), 4)).unwrap();
        let write = b.gpu.create_surface(image(dst, [10, 3, 1], ChannelFormat::Signed(32), 2)).unwrap();
        let run = |n| {
            let p = Params::default().u64(write).u64(read).i32(n);
            b.run(m, "surfaces", LaunchConfig::linear(3, 32), &p.0)
        };
        run(10).unwrap();
        let want: Vec<i32> = from.chunks(2).map(|c| i32::from(c[0]) + 256 * i32::from(c[1])).collect();
        assert_eq!(b.download::<i32>(dst, 60), want);
        assert_eq!(run(11).unwrap_err().cuda_code(), 700);
    });
}
