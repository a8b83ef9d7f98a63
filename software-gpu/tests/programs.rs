//! Ordinary CUDA programs compiled by nvcc, compared with results computed here.

// Test helpers are test code too.
#![allow(clippy::unwrap_used)]

mod common;

use common::{BASE, Bench, Params, shape};
use software_gpu::{Error, Event, Fault, LaunchConfig, Module};

/// Runs a test with optimized and with unoptimized PTX.
fn both(test: impl Fn(&Bench, &Module)) {
    for text in
        [include_bytes!("ptx/programs.ptx").as_slice(), include_bytes!("ptx/programs.O0.ptx").as_slice()]
    {
        let bench = Bench::new();
        let module = bench.gpu.load_module(text).unwrap();
        test(&bench, &module);
    }
}

#[test]
fn vector_add_adds_exactly_its_elements() {
    both(|b, m| {
        let n = 100_003usize;
        let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
        let y: Vec<f32> = (0..n).map(|i| 1e6 - i as f32).collect();
        let (dx, dy, dz) = (b.upload(&x), b.upload(&y), b.upload(&vec![7f32; n + 5]));
        let p = Params::default().u64(dx).u64(dy).u64(dz).i32(n as i32);
        b.run(m, "vector_add", LaunchConfig::linear((n as u32).div_ceil(256), 256), &p.0).unwrap();
        let z: Vec<f32> = b.download(dz, n + 5);
        assert!((0..n).all(|i| z[i] == x[i] + y[i]));
        assert!(z[n..].iter().all(|&v| v == 7.0));
    });
}

#[test]
fn tiled_matrix_product_is_exact_on_integers() {
    both(|b, m| {
        for tile in [16u32, 32] {
            let (ha, wa, wb) = (64usize, 96usize, 128usize);
            let a: Vec<f32> = (0..ha * wa).map(|i| (i % 13) as f32 - 6.0).collect();
            let c: Vec<f32> = (0..wa * wb).map(|i| (i % 7) as f32 - 3.0).collect();
            let (da, dc, dr) = (b.upload(&a), b.upload(&c), b.upload(&vec![0f32; ha * wb]));
            let p = Params::default().u64(dr).u64(da).u64(dc).i32(wa as i32).i32(wb as i32);
            let config = shape([wb as u32 / tile, ha as u32 / tile, 1], [tile, tile, 1]);
            b.run(m, &format!("matrix_mul_{tile}"), config, &p.0).unwrap();
            let r: Vec<f32> = b.download(dr, ha * wb);
            for y in 0..ha {
                for x in 0..wb {
                    let want: f32 = (0..wa).map(|k| a[y * wa + k] * c[k * wb + x]).sum();
                    assert_eq!(r[y * wb + x], want, "row {y} column {x}");
                }
            }
        }
    });
}

#[test]
fn reduction_with_dynamic_shared_memory_and_shuffles() {
    both(|b, m| {
        let n = 50_000usize;
        let x: Vec<f64> = (0..n).map(|i| (i % 1000) as f64).collect();
        let (dx, dr) = (b.upload(&x), b.upload(&[0f64]));
        let p = Params::default().u64(dx).u64(dr).i32(n as i32);
        let config = LaunchConfig { dynamic_shared: 256 * 8, ..LaunchConfig::linear(13, 256) };
        b.run(m, "reduce", config, &p.0).unwrap();
        assert_eq!(b.download::<f64>(dr, 1)[0], x.iter().sum::<f64>());
    });
}

#[test]
fn transpose_through_shared_memory() {
    both(|b, m| {
        let (w, h) = (100usize, 70usize);
        let x: Vec<f32> = (0..w * h).map(|i| i as f32).collect();
        let (dx, dr) = (b.upload(&x), b.upload(&vec![0f32; w * h]));
        let p = Params::default().u64(dr).u64(dx).i32(w as i32).i32(h as i32);
        b.run(m, "transpose", shape([4, 3, 1], [32, 8, 1]), &p.0).unwrap();
        let r: Vec<f32> = b.download(dr, w * h);
        for y in 0..h {
            for x in 0..w {
                assert_eq!(r[x * h + y], (y * w + x) as f32);
            }
        }
    });
}

#[test]
fn histogram_with_shared_and_global_atomics() {
    both(|b, m| {
        let data: Vec<u8> = (0..77_777u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let (dx, dr) = (b.upload(&data), b.upload(&[0u32; 256]));
        let p = Params::default().u64(dx).u64(dr).i32(data.len() as i32);
        b.run(m, "histogram", LaunchConfig::linear(9, 192), &p.0).unwrap();
        let mut want = [0u32; 256];
        data.iter().for_each(|&v| want[v as usize] += 1);
        assert_eq!(b.download::<u32>(dr, 256), want);
    });
}

#[test]
fn recursion_of_diverging_depth() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 64]);
        b.run(m, "recursive", LaunchConfig::linear(1, 64), &dr.to_le_bytes()).unwrap();
        let fib = |n: i32| (0..n).fold((0, 1), |(a, b), _| (b, a + b)).0;
        let want: Vec<i32> = (0..64).map(|i| fib(i % 15)).collect();
        assert_eq!(b.download::<i32>(dr, 64), want);
    });
}

#[test]
fn function_pointers_from_a_table() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 40]);
        b.run(m, "pointers", LaunchConfig::linear(1, 40), &dr.to_le_bytes()).unwrap();
        let want: Vec<i32> = (0..40).map(|i| [i + 7, i * 7, i ^ 7][i as usize % 3]).collect();
        assert_eq!(b.download::<i32>(dr, 40), want);
    });
}

#[test]
fn constants_structures_by_value_and_globals_by_name() {
    both(|b, m| {
        let dr = b.upload(&[0f32; 18]);
        let mut p = Params::default().u64(dr).i32(10).i32(0);
        p.0.extend(2.5f64.to_le_bytes());
        p.0.extend(*b"abcdefghi");
        p.0.resize(40, 0);
        b.run(m, "constants", LaunchConfig::linear(1, 18), &p.0).unwrap();
        let r: Vec<f32> = b.download(dr, 18);
        for (i, &got) in r.iter().enumerate() {
            assert_eq!(got, (i & 3) as f32 * 2.5 + 2.5 + 10.0 + (b'a' + (i % 9) as u8) as f32);
        }
        let counter = m.global("counter").unwrap();
        assert_eq!(counter.size, 4);
        assert_eq!(b.download::<i32>(counter.address, 1)[0], 5 + 18);
        assert!(m.global("coefficients").unwrap().constant);
    });
}

#[test]
fn printf_formats_as_c_does() {
    both(|b, m| {
        b.run(m, "prints", LaunchConfig::linear(1, 32), &77i32.to_le_bytes()).unwrap();
        let text = String::from_utf8(b.printed.lock().unwrap().clone()).unwrap();
        let line = |t| format!("thread {t} of block: 25.67|77    |00004d|q|1e+10|1099511627776%\n");
        assert_eq!(text, line(0) + &line(1));
    });
}

#[test]
fn a_failed_assertion_is_sticky_and_reports_its_location() {
    both(|b, m| {
        let error = b.run(m, "asserts", LaunchConfig::linear(1, 64), &40i32.to_le_bytes()).unwrap_err();
        assert_eq!(error.cuda_code(), 710);
        let Error::Kernel { fault: Fault::Assert { message, file, function, .. }, location } = &error else {
            panic!("{error}");
        };
        assert_eq!(message, "threadIdx.x < x");
        assert!(file.ends_with("programs.cu"), "{file}");
        assert!(function.contains("asserts"), "{function}");
        assert_eq!((location.thread, location.kernel.as_str()), ([40, 0, 0], "asserts"));
        assert_eq!(b.gpu.read(BASE, &mut [0]).unwrap_err(), error);
        assert_eq!(b.gpu.place(BASE, 4).unwrap_err(), error);
    });
}

#[test]
fn accesses_outside_allocations_fault() {
    for (index, ok) in [(9, true), (10, false), (-1, false), (128, false), (1 << 29, false)] {
        both(|b, m| {
            let at = b.alloc(40);
            let p = Params::default().u64(at).i32(index);
            let result = b.run(m, "out_of_bounds", LaunchConfig::linear(1, 1), &p.0);
            assert_eq!(
                result.map_err(|e| e.cuda_code()),
                if ok { Ok(()) } else { Err(700) },
                "index {index}"
            );
        });
    }
}

#[test]
fn misaligned_accesses_and_traps_return_cuda_s_codes() {
    both(|b, m| {
        let at = b.alloc(40);
        let error = b.run(m, "misaligned", LaunchConfig::linear(1, 1), &at.to_le_bytes()).unwrap_err();
        assert_eq!(error.cuda_code(), 716, "{error}");
    });
    both(|b, m| {
        let error = b.run(m, "traps", LaunchConfig::linear(1, 1), &[]).unwrap_err();
        assert_eq!(error.cuda_code(), 719, "{error}");
    });
}

#[test]
fn threads_of_a_warp_can_wait_for_each_other() {
    for kernel in ["locks", "spin_lock"] {
        both(|b, m| {
            let (lock, sum) = (b.upload(&[0i32]), b.upload(&[0i32]));
            let p = Params::default().u64(lock).u64(sum);
            b.run(m, kernel, LaunchConfig::linear(6, 96), &p.0).unwrap();
            assert_eq!(b.download::<i32>(sum, 1)[0], 6 * (95 * 96 / 2), "{kernel}");
        });
    }
}

#[test]
fn votes_shuffles_matches_and_counting_barriers() {
    both(|b, m| {
        let dr = b.upload(&[0u32; 256]);
        b.run(m, "votes", LaunchConfig::linear(1, 32), &dr.to_le_bytes()).unwrap();
        let r: Vec<u32> = b.download(dr, 256);
        let thirds = (0..32).filter(|t| t % 3 == 0).fold(0u32, |m, t| m | 1 << t);
        for t in 0..32u32 {
            let got = &r[t as usize * 8..][..8];
            assert_eq!(got[0], 0xaaaa_aaaa);
            assert_eq!((got[1], got[2]), (1, 1));
            assert_eq!(got[3], (t ^ 3) * (t ^ 3));
            assert_eq!(got[4], if t % 8 < 2 { t } else { t - 2 });
            assert_eq!(got[5], t / 4 * 4 + 3);
            if t % 3 == 0 {
                assert_eq!(got[6], thirds);
            } else {
                assert_eq!(got[6], (0..32).filter(|k| k / 8 == t / 8 && k % 3 != 0).count() as u32);
            }
            assert_eq!(got[7], 21 * 4 + 2, "counting barriers");
        }
    });
}

#[test]
fn divergent_loops_and_switches() {
    both(|b, m| {
        let dr = b.upload(&[0i32; 128]);
        b.run(m, "switches", LaunchConfig::linear(1, 128), &dr.to_le_bytes()).unwrap();
        let want: Vec<i32> = (0..128i32).map(switches).collect();
        assert_eq!(b.download::<i32>(dr, 128), want);
    });
}

fn switches(t: i32) -> i32 {
    let mut r = 0i32;
    for i in 0..t {
        match (i * 7 + t) % 9 {
            0 => r = r.wrapping_add(3),
            1 => r ^= t,
            2 => r = r.wrapping_mul(3),
            3 => r = r.wrapping_sub(i),
            4 => r = r << 1 | 1,
            5 => r = (r as u32).reverse_bits() as i32,
            6 => {
                if r & 1 != 0 {
                    continue;
                }
                r = r.wrapping_add(r.leading_zeros() as i32);
            }
            7 => r ^= (((t as u32 as u64) << 32 | r as u32 as u64) << (i & 31) >> 32) as i32,
            _ => {
                r = r.wrapping_add(
                    r.count_ones() as i32 + if r == 0 { 0 } else { r.trailing_zeros() as i32 + 1 },
                )
            }
        }
        if (i * 7 + t) % 9 == 5 {
            r = (r as u32 >> 3) as i32;
        }
        if r == 12345 {
            break;
        }
    }
    r
}

#[test]
fn in_kernel_malloc_and_free() {
    both(|b, m| {
        let dr = b.upload(&[1u64; 48]);
        b.run(m, "heap", LaunchConfig::linear(1, 48), &dr.to_le_bytes()).unwrap();
        for (t, p) in b.download::<u64>(dr, 48).into_iter().enumerate() {
            if t % 2 == 1 {
                assert_eq!(p, 0);
            } else {
                assert_eq!(b.download::<u32>(p + 12, 1)[0], t as u32);
            }
        }
    });
}

#[test]
fn the_math_library_is_accurate() {
    both(|b, m| {
        let x: Vec<f32> = (0..1000).map(|i| i as f32 * 0.01).collect();
        let dx = b.upload(&x);
        b.run(m, "fast_math", LaunchConfig::linear(4, 256), &Params::default().u64(dx).i32(1000).0).unwrap();
        let y: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        let dy = b.upload(&y);
        b.run(m, "double_math", LaunchConfig::linear(4, 256), &Params::default().u64(dy).i32(1000).0)
            .unwrap();
        let (single, double): (Vec<f32>, Vec<f64>) = (b.download(dx, 1000), b.download(dy, 1000));
        for i in 0..1000 {
            let (s, d) = (f64::from(single[i]), double[i]);
            assert!((s - d).abs() <= 2e-5 * d.abs().max(1.0), "x = {}: {s} and {d}", x[i]);
        }
        let v = 0.5f64;
        let erf = 0.520_499_877_813_046_5;
        let want = v.sin() + v.exp() * (1.0 + v).ln() + v.powf(1.5) + 1.0 / (v + 1.0).sqrt() + v.tan() + erf;
        assert!((double[50] - want).abs() < 1e-6, "{} and {want}", double[50]);
    });
}

#[test]
fn streams_run_concurrently_and_events_order_them() {
    let bench = Bench::new();
    let module = bench.gpu.load_module(include_bytes!("ptx/programs.ptx")).unwrap();
    let flag = bench.upload(&[0i32]);
    let (waiting, other) = (bench.gpu.stream(), bench.gpu.stream());
    let (start, end) = (Event::new(), Event::new());
    waiting.record(&start).unwrap();
    let forever = module.function("forever").unwrap();
    waiting.launch(&forever, LaunchConfig::linear(1, 64), &flag.to_le_bytes()).unwrap();
    waiting.record(&end).unwrap();
    assert!(!end.query());
    let out = bench.upload(&[0i32; 64]);
    let recursive = module.function("recursive").unwrap();
    other.launch(&recursive, LaunchConfig::linear(1, 64), &out.to_le_bytes()).unwrap();
    other.synchronize().unwrap();
    assert_eq!(bench.download::<i32>(out, 14)[13], 233);
    assert!(!waiting.query().unwrap());
    other.enqueue(move |gpu| gpu.write(flag, &1i32.to_le_bytes())).unwrap();
    waiting.synchronize().unwrap();
    assert!(end.elapsed_ns_since(&start).unwrap() > 0);
}

#[test]
fn a_kernel_that_never_ends_can_be_cancelled() {
    let bench = Bench::new();
    let module = bench.gpu.load_module(include_bytes!("ptx/programs.ptx")).unwrap();
    let flag = bench.upload(&[0i32]);
    let stream = bench.gpu.stream();
    let forever = module.function("forever").unwrap();
    stream.launch(&forever, LaunchConfig::linear(2, 64), &flag.to_le_bytes()).unwrap();
    bench.gpu.cancel();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, Error::Kernel { fault: Fault::Cancelled, .. }), "{error}");
}

#[test]
fn the_newest_ptx_of_a_fat_binary_is_used() {
    let bench = Bench::new();
    for image in [
        include_bytes!("ptx/programs.zstd.fatbin").as_slice(),
        include_bytes!("ptx/programs.plain.fatbin").as_slice(),
    ] {
        let module = bench.gpu.load_module(image).unwrap();
        assert!(module.function("vector_add").is_ok());
    }
    let module = bench.gpu.load_module(include_bytes!("ptx/programs.zstd.fatbin")).unwrap();
    assert_eq!(module.functions()[0].ptx_version, 90);
    let error = bench.gpu.load_module(b"\x7fELF\x02\x01\x01").err().unwrap();
    assert_eq!(error.cuda_code(), 209);
}
