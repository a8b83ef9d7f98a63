//! The corpus's clusters: block positions, memory of other blocks, and barriers between blocks.

use super::{Case, Check, Corpus, Random, rare};

/// A kernel with clusters. The inputs are a word `%a` and a word `%b` per thread, the results `%r0` and
/// following.
fn case(c: &mut Corpus, name: &str, size: [u32; 3], kind: &str, results: usize, work: &str) {
    let blocks: u32 = size.iter().product();
    let grid = [size[0] * 2, size[1], size[2] * 2];
    let each = 8;
    let threads = blocks * 4 * each;
    let mut text =
        String::from("  .reg .b64 %pi, %po, %off, %y<8>;\n  .reg .b32 %t, %g, %a, %b, %x<8>, %r<16>;\n");
    text.push_str(
        "  .reg .pred %p, %q;\n  .shared .align 16 .b8 mem[1024];\n  .shared .align 8 .b64 gate;\n",
    );
    text.push_str("  ld.param.u64 %pi, [pin];\n  ld.param.u64 %po, [pout];\n  mov.u32 %t, %tid.x;\n");
    text.push_str("  mov.u32 %x0, %ctaid.z;\n  mov.u32 %x1, %nctaid.y;\n  mov.u32 %x2, %ctaid.y;\n  mad.lo.u32 %x0, %x0, %x1, %x2;\n");
    text.push_str("  mov.u32 %x1, %nctaid.x;\n  mov.u32 %x2, %ctaid.x;\n  mad.lo.u32 %x0, %x0, %x1, %x2;\n");
    text.push_str(&format!(
        "  mad.lo.u32 %g, %x0, {each}, %t;\n  mul.wide.u32 %off, %g, 32;\n  add.u64 %pi, %pi, %off;\n"
    ));
    text.push_str(&format!("  mul.wide.u32 %off, %g, {};\n  add.u64 %po, %po, %off;\n", results * 4));
    text.push_str("  ld.global.b32 %a, [%pi];\n  ld.global.b32 %b, [%pi+8];\n");
    for line in work.split(';').map(str::trim).filter(|l| !l.is_empty()) {
        text.push_str(&format!("  {line}{}\n", if line.ends_with(':') { "" } else { ";" }));
    }
    for n in 0..results {
        text.push_str(&format!("  st.global.b32 [%po+{}], %r{n};\n", n * 4));
    }
    // No block exits while another may still access its memory.
    text.push_str("  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n  ret;\n");
    let mut r = Random(0x2545_f491_4f6c_dd1d ^ u64::from(blocks * 64 + size[0] * 8 + size[1]));
    let input = |r: &mut Random| match kind {
        "u32" => r.next() & 0xffff_ffff,
        kind => {
            let random = r.next();
            rare::value(kind, random, r)
        }
    };
    let inputs = (0..threads).map(|_| [input(&mut r), input(&mut r), 0, 0]).collect();
    c.cases.push(Case {
        name: format!("{name}, clusters of {size:?}"),
        ty: "b32",
        out_bytes: results * 4,
        check: Check::Exact,
        body: text,
        inputs,
        head: format!("\n.explicitcluster\n.reqnctapercluster {}, {}, {}", size[0], size[1], size[2]),
        grid,
    });
}

/// Clusters of several sizes.
pub fn clusters(c: &mut Corpus) {
    let sync = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; ";
    // A thread's word here, at the same address in the next block, and in the block with the highest rank.
    let next = "mov.u32 %x7, mem; mad.lo.u32 %x7, %t, 4, %x7; mov.u32 %x6, %cluster_ctarank; mov.u32 %x5, %cluster_nctarank; add.u32 %x4, %x6, 1; rem.u32 %x4, %x4, %x5; ";
    for size in [
        [1, 1, 1],
        [2, 1, 1],
        [1, 2, 1],
        [1, 1, 4],
        [2, 2, 1],
        [3, 1, 1],
        [1, 3, 2],
        [2, 2, 2],
        [8, 1, 1],
        [4, 2, 2],
    ] {
        let mut places = String::new();
        let registers = ["clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"];
        let words = registers.iter().flat_map(|name| ["x", "y", "z"].map(|axis| format!("{name}.{axis}")));
        let all = words.chain(["cluster_ctarank".into(), "cluster_nctarank".into()]);
        for (n, name) in all.enumerate() {
            places.push_str(&format!("mov.u32 %r{n}, %{name}; "));
        }
        places.push_str("mov.pred %p, %is_explicit_cluster; selp.u32 %r14, 1, 0, %p; ");
        case(c, "places", size, "u32", 15, &places);

        case(
            c,
            "ld.shared::cluster, st.shared::cluster",
            size,
            "u32",
            5,
            &format!(
                "{next}st.shared.b32 [%x7], %a; {sync}mapa.shared::cluster.u32 %x3, %x7, %x4; ld.shared::cluster.u32 %r0, [%x3]; \
             cvt.u64.u32 %y0, %x7; cvta.shared.u64 %y0, %y0; mapa.u64 %y1, %y0, %x4; ld.u32 %r1, [%y1]; \
             getctarank.shared::cluster.u32 %r2, %x3; getctarank.u64 %r3, %y1; \
             st.shared::cluster.b32 [%x3+512], %b; {sync}ld.shared.b32 %r4, [%x7+512]; "
            ),
        );

        case(
            c,
            "isspacep",
            size,
            "u32",
            2,
            &format!(
                "{next}mapa.shared::cluster.u32 %x3, %x7, %x4; cvt.u64.u32 %y0, %x7; cvta.shared.u64 %y0, %y0; mapa.u64 %y1, %y0, %x4; \
             mov.u32 %r0, 0; mov.u32 %r1, 0; \
             isspacep.shared::cta %p, %y0; @%p or.b32 %r0, %r0, 1; isspacep.shared::cluster %p, %y0; @%p or.b32 %r0, %r0, 2; \
             isspacep.shared::cta %p, %y1; @%p or.b32 %r0, %r0, 4; isspacep.shared::cluster %p, %y1; @%p or.b32 %r0, %r0, 8; \
             isspacep.global %p, %y1; @%p or.b32 %r0, %r0, 16; isspacep.shared %p, %y1; @%p or.b32 %r0, %r0, 32; \
             isspacep.shared::cluster %p, %pi; @%p or.b32 %r1, %r1, 1; isspacep.local %p, %y1; @%p or.b32 %r1, %r1, 2; "
            ),
        );

        // Every thread of the cluster adds to the same words in the block of rank 0.
        case(c, "atom.shared::cluster", size, "u32", 6, &format!(
            "{next}st.shared.b32 [%x7], 0; st.shared.b32 [%x7+256], -1; st.shared.b32 [%x7+512], %a; {sync}\
             mapa.shared::cluster.u32 %x3, %x7, 0; atom.shared::cluster.add.u32 %x2, [%x3], %a; red.shared::cluster.cluster.max.u32 [%x3+128], %b; \
             atom.shared::cluster.and.b32 %x2, [%x3+256], %a; red.relaxed.cluster.shared::cluster.xor.b32 [%x3+384], %b; \
             mapa.shared::cluster.u32 %x2, %x7, %x4; atom.acq_rel.cluster.shared::cluster.exch.b32 %r4, [%x2+512], %b; {sync}\
             ld.shared::cluster.u32 %r0, [%x3]; ld.shared::cluster.u32 %r1, [%x3+128]; ld.shared::cluster.u32 %r2, [%x3+256]; ld.shared::cluster.u32 %r3, [%x3+384]; ld.shared.b32 %r5, [%x7+512]; ")
            .replace("st.shared.b32 [%x7], 0", "st.shared.b32 [%x7], 0; st.shared.b32 [%x7+128], 0; st.shared.b32 [%x7+384], 0"));

        for kind in ["tiny32", "nan32"] {
            case(
                c,
                &format!("atom.shared::cluster.add.f32 of {kind}"),
                size,
                kind,
                2,
                &format!(
                    "{next}st.shared.b32 [%x7], %a; {sync}mapa.shared::cluster.u32 %x3, %x7, %x4; atom.shared::cluster.add.f32 %r0, [%x3], %b; {sync}ld.shared.b32 %r1, [%x7]; "
                ),
            );
        }

        // Arrivals and stored bytes complete on the next block's barrier.
        case(
            c,
            "mbarrier, st.async, red.async",
            size,
            "u32",
            3,
            &format!(
                "{next}mov.u32 %x2, gate; setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%x2], 9; st.shared.b32 [%x7+256], %a; \
             @%p mbarrier.arrive.expect_tx.shared.b64 _, [%x2], 64; fence.mbarrier_init.release.cluster; {sync}\
             mapa.shared::cluster.u32 %x3, %x7, %x4; mapa.shared::cluster.u32 %x1, %x2, %x4; \
             st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%x3], %b, [%x1]; \
             red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%x3+256], %b, [%x1]; \
             mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%x1]; \
             W:; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [%x2], 0; @!%q bra W; \
             ld.shared.b32 %r0, [%x7]; ld.shared.b32 %r1, [%x7+256]; mbarrier.test_wait.parity.shared.b64 %q, [%x2], 1; selp.u32 %r2, 1, 0, %q; "
            ),
        );

        // One copy moves all threads' words from one block's memory to the next block's.
        case(
            c,
            "cp.async.bulk between blocks",
            size,
            "u32",
            1,
            &format!(
                "{next}mov.u32 %x2, gate; setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%x2], 1; st.shared.b32 [%x7], %a; \
             @%p mbarrier.arrive.expect_tx.shared.b64 _, [%x2], 32; fence.mbarrier_init.release.cluster; fence.proxy.async; {sync}\
             mapa.shared::cluster.u32 %x3, %x7, %x4; mapa.shared::cluster.u32 %x1, %x2, %x4; \
             @%p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%x3+512], [%x7], 32, [%x1]; \
             W:; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [%x2], 0; @!%q bra W; ld.shared.b32 %r0, [%x7+512]; "
            ),
        );
        for (op, ty) in [
            ("add", "u32"),
            ("add", "s32"),
            ("min", "s32"),
            ("max", "u32"),
            ("inc", "u32"),
            ("dec", "u32"),
            ("and", "b32"),
            ("xor", "b32"),
            ("add", "u64"),
        ] {
            case(
                c,
                &format!("cp.reduce.async.bulk.{op}.{ty} between blocks"),
                size,
                "u32",
                1,
                &format!(
                    "{next}mov.u32 %x2, gate; setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%x2], 1; st.shared.b32 [%x7], %a; st.shared.b32 [%x7+512], %b; \
                 @%p mbarrier.arrive.expect_tx.shared.b64 _, [%x2], 32; fence.mbarrier_init.release.cluster; fence.proxy.async; {sync}\
                 mapa.shared::cluster.u32 %x3, %x7, %x4; mapa.shared::cluster.u32 %x1, %x2, %x4; \
                 @%p cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{ty} [%x3+512], [%x7], 32, [%x1]; \
                 W:; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [%x2], 0; @!%q bra W; ld.shared.b32 %r0, [%x7+512]; "
                ),
            );
        }
    }
}
