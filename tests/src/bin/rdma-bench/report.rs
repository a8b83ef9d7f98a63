//! The results as text and plots.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::bed::{CALLS, VOLUME};
use super::plot::{Curve, plot};
use super::{
    Bulk, Cost, Counts, DEPTH_SIZE, DEPTHS, DIRECTIONS, PAIRS, Points, ROUND_SIZES, Rounds, SIZES, WAYS, Who,
};

/// Everything that was measured.
pub struct Study<'s> {
    pub points: &'s Points,
    pub rounds: &'s Rounds,
    pub counts: &'s Counts,
    pub cost: &'s BTreeMap<&'static str, Cost>,
    /// The machine was virtualised, not emulated.
    pub fast: bool,
}

/// The files of the report: name and content.
pub fn files(study: &Study<'_>) -> Vec<(&'static str, String)> {
    let mut files = Vec::new();
    for (who, file, title) in
        [("h2d", "verbs-h2d.svg", "to the server"), ("d2h", "verbs-d2h.svg", "from the server")]
    {
        let x: Vec<f64> = SIZES.iter().map(|size| *size as f64).collect();
        let curves: Vec<Curve> = PAIRS
            .iter()
            .flat_map(|pairs| {
                ["ib_write_bw", who].map(|who| {
                    let y = SIZES.iter().map(|size| study.point(who, *size, *pairs, 128)).collect();
                    (format!("{who}, {}", queue_pairs(*pairs)), *pairs as usize, who == "ib_write_bw", y)
                })
            })
            .collect();
        files.push((file, plot(&format!("Bandwidth {title}, depth 128"), "bytes", &x, &curves)));
    }
    let x: Vec<f64> = DEPTHS.iter().map(|depth| f64::from(*depth)).collect();
    let curves: Vec<Curve> = ["ib_write_bw", "h2d", "d2h"]
        .iter()
        .enumerate()
        .map(|(i, who)| {
            let y = DEPTHS.iter().map(|depth| study.point(who, DEPTH_SIZE, 2, *depth)).collect();
            ((*who).to_owned(), i + 1, i == 0, y)
        })
        .collect();
    let title = format!("Bandwidth against depth, {}, 2 queue pairs", bytes(DEPTH_SIZE));
    files.push(("verbs-depth.svg", plot(&title, "requests under way on a queue pair", &x, &curves)));
    files.push(("verbs.md", study.text()));
    files
}

impl Study<'_> {
    /// The median of a point.
    fn point(&self, who: &'static str, size: u64, pairs: u32, depth: u32) -> f64 {
        self.points.get(&(who, size, pairs, depth)).map_or(f64::NAN, |all| median(all))
    }

    fn bulk(&self, size: u64, who: Who, of: impl Fn(&Bulk) -> f64) -> Vec<f64> {
        self.rounds.bulk.get(&(size, who)).map(|all| all.iter().map(of).collect()).unwrap_or_default()
    }

    /// The ratio of ours to theirs, round by round.
    fn ratio(&self, size: u64, ours: Who, theirs: Who) -> String {
        let (ours, theirs) = (self.bulk(size, ours, |b| b.rate), self.bulk(size, theirs, |b| b.rate));
        spread(ours.iter().zip(theirs).map(|(ours, theirs)| 100.0 * ours / theirs), 0, " %")
    }

    fn text(&self) -> String {
        let repetitions = self.points.values().map(Vec::len).min().unwrap_or(0);
        let mut text = format!(
            "# Verbs beside perftest\n\n\
             Made by `cargo xtask bench --verbs`, in one machine with two processors and RoCE in software (`rdma_rxe`, Linux 6.1), {}. There is no card: the\n\
             speeds are those of processors that copy and checksum each packet for both ends, and only ratios of consecutive measurements mean something.\n\
             `h2d` is from a client's pages, no two of them neighbours, into the server's slots; `d2h` from the server's registered memory into such pages. \"The layer\" is\n\
             `tests/peers/src/bin/verbs.rs`: the code that both daemons use, without the rest of what they do. \"A CUDA program\" makes page-locked asynchronous copies through\n\
             `vhost-rgpu` and `rgpu-server` with the GPU in software; the same two processors make its copy into its own memory.\n",
            if self.fast { "virtualised by KVM" } else { "emulated by QEMU (TCG) on a host with other work" },
        );
        self.against(&mut text);
        self.transfer(&mut text);
        self.latency(&mut text);
        self.sizes(&mut text, repetitions);
        self.depths(&mut text, repetitions);
        text
    }

    fn against(&self, text: &mut String) {
        let rounds = self.rounds.one_way.len();
        let _ = writeln!(
            text,
            "\n## Bulk against `ib_write_bw`, round by round\n\n{rounds} rounds; in each, perftest and rgpu take turns, {} per measurement, depth 128. The ratio of the two in the same round: median (least to most).\nThe aim is 95 %.\n\n| size | ours | `ib_write_bw`'s queue pairs | h2d | d2h |\n|---|---|---|---|---|",
            bytes(VOLUME)
        );
        for size in ROUND_SIZES {
            for (name, ours, theirs) in [
                ("the layer, 1 queue pair", 1, 1),
                ("the layer, 2 queue pairs", 2, 1),
                ("a CUDA program, 2 queue pairs", 0, 1),
                ("the layer, 2 queue pairs", 2, 2),
                ("a CUDA program, 2 queue pairs", 0, 2),
            ] {
                let who = |what| if ours == 0 { Who::Program(what) } else { Who::Layer(ours, what) };
                let cells = DIRECTIONS.map(|what| self.ratio(size, who(what), Who::Perftest(theirs)));
                let _ =
                    writeln!(text, "| {} | {name} | {theirs} | {} | {} |", bytes(size), cells[0], cells[1]);
            }
        }
        let _ = writeln!(
            text,
            "\n`ib_write_bw` has one queue pair unless told otherwise, rgpu has two. What the processors did meanwhile ({}, medians): the time that both together spent in the kernel, where `rdma_rxe` does all\nits work, per MiB, and how many of them this kept busy at a time. Our programs measure it themselves, right before and right after the transfer; for perftest it is the whole run, less a run that transfers 20 KiB:\n\n| | MB/s | ms in the kernel per MiB | processors |\n|---|---|---|---|",
            bytes(ROUND_SIZES[0])
        );
        let lines = [
            ("`ib_write_bw`, 1 queue pair", Who::Perftest(1)),
            ("`ib_write_bw`, 2 queue pairs", Who::Perftest(2)),
            ("the layer, 1 queue pair, h2d", Who::Layer(1, "h2d")),
            ("the layer, 1 queue pair, d2h", Who::Layer(1, "d2h")),
            ("the layer, 2 queue pairs, h2d", Who::Layer(2, "h2d")),
            ("the layer, 2 queue pairs, d2h", Who::Layer(2, "d2h")),
            ("a CUDA program, 2 queue pairs, h2d", Who::Program("h2d")),
            ("a CUDA program, 2 queue pairs, d2h", Who::Program("d2h")),
            ("`ib_write_bw`, 1 queue pair, each end held on its own processor", Who::Held(1)),
            ("`ib_write_bw`, 2 queue pairs, each end held on its own processor", Who::Held(2)),
        ];
        for (name, who) in lines {
            let values = [|b: &Bulk| b.rate, |b: &Bulk| b.kernel, |b: &Bulk| b.busy]
                .map(|of| self.bulk(ROUND_SIZES[0], who, of));
            let _ = writeln!(
                text,
                "| {name} | {} | {} | {} |",
                spread(values[0].iter().copied(), 0, ""),
                spread(values[1].iter().copied(), 1, ""),
                spread(values[2].iter().copied(), 2, "")
            );
        }
        let _ = writeln!(
            text,
            "\nWhoever keeps more processors busy at a time is faster, and the kernel's scheduler decides that by where it runs the posting threads: held on one processor (`taskset`; its polling then takes time from\nthe packets), `ib_write_bw` gains nothing from a second queue pair. Two of perftest's queue pairs mostly get both processors and two of rgpu's mostly do not. That is why the rows against two queue pairs\ndiffer from those against one; a card needs no processor to carry packets. A CUDA program runs beside the GPU in software, which copies each byte once more, outside the kernel. The figures exclude the\nprogram's start (creating its session and a worker, zeroing its memory page by page and registering it). They once included it: half a second of kernel time for 32 MiB, which made the transfer look half\nas long again as it is."
        );
    }

    fn transfer(&self, text: &mut String) {
        let mib = VOLUME as f64 / f64::from(1 << 20);
        let each = |what: &str, i: usize| self.counts.get(what).map_or(f64::NAN, |all| all[i] / mib);
        let _ = writeln!(
            text,
            "\n## What a MiB takes\n\n| | writes, a doorbell and a completion each | messages |\n|---|---|---|\n| `ib_write_bw -s 1048576` | 1, and 1 completion for 100 | 0 |\n| h2d | {:.2} | {:.2} |\n| d2h | {:.2} | {:.2} |\n\nCounted by the client's end. The server's slots hold 512 KiB, hence two writes; each write with immediate data is one completion at either end. The messages announce free slots, requests and what was sent.",
            each("h2d", 0),
            each("h2d", 2) + each("h2d", 3),
            each("d2h", 1),
            each("d2h", 2) + each("d2h", 3),
        );
    }

    fn latency(&self, text: &mut String) {
        let rounds = self.rounds;
        let ratio = |of: &[f64], part: f64| {
            spread(of.iter().zip(&rounds.one_way).map(|(ours, theirs)| part * ours / theirs), 1, "")
        };
        let all = |of: &[f64]| spread(of.iter().copied(), 1, "");
        let _ = writeln!(
            text,
            "\n## A call of 64 bytes\n\nMedians of each round, in µs: median of the rounds (least to most).\n\n| | µs | in times of `ib_write_lat` |\n|---|---|---|\n| `ib_write_lat`, 64 bytes, one way | {} | 1 |\n| the layer: a message of 64 bytes and its answer, polled on both ends as perftest does it | {} | {} |\n| half of that: one way | {} | {} |",
            all(&rounds.one_way),
            all(&rounds.round_trip),
            ratio(&rounds.round_trip, 1.0),
            spread(rounds.round_trip.iter().map(|time| time / 2.0), 1, ""),
            ratio(&rounds.round_trip, 0.5)
        );
        for (what, name) in [
            ("memory_info", "`cudaMemGetInfo`, which asks the worker and no device"),
            ("dtoh", "`cudaMemcpy` of 64 bytes to the host"),
        ] {
            for way in WAYS {
                let times = rounds.calls.get(&(way, what)).map_or(&[][..], Vec::as_slice);
                let _ = writeln!(text, "| {name}, over `{way}` | {} | {} |", all(times), ratio(times, 1.0));
            }
            if let [Some(local), Some(verbs)] = WAYS.map(|way| rounds.calls.get(&(way, what))) {
                let part: Vec<f64> = verbs.iter().zip(local).map(|(verbs, local)| verbs - local).collect();
                let _ = writeln!(text, "| what verbs adds to it | {} | {} |", all(&part), ratio(&part, 1.0));
            }
        }
        let cost =
            |name: &str| self.cost.get(name).copied().unwrap_or(Cost { calls: f64::NAN, sleeps: f64::NAN });
        let (bridge, worker) = (cost("vhost-rgpu"), cost("worker"));
        let _ = writeln!(
            text,
            "\nThe aim is 3 times `ib_write_lat` for the network's part of a synchronous call, {CALLS} calls a round. That part alone, a message and its answer, is the second line: both ways together.\nVerbs adds more than that to a whole call, but not because of the network: over `local` the program and the worker's dispatcher share memory and have a processor each. Over verbs, `vhost-rgpu`'s relay and the\nworker's pump are involved, too, and these four and the packets share the same two processors, while `ib_write_lat` has two threads that never yield theirs. In a `cudaMemGetInfo` over verbs `vhost-rgpu` made {:.1}\nsystem calls that read or write (a doorbell is one) and fell asleep {:.2} times, the worker {:.1} and {:.2}.",
            bridge.calls, bridge.sleeps, worker.calls, worker.sleeps
        );
    }

    fn sizes(&self, text: &mut String, repetitions: usize) {
        let _ = writeln!(
            text,
            "\n## Bandwidth against size\n\n![to the server](verbs-h2d.svg)\n![from the server](verbs-d2h.svg)\n\nMB/s of `ib_write_bw`, and how much of it the layer reaches: medians of {repetitions} measurements of {} each, depth 128. On a busy host the same point varies by a factor of two from one measurement to the next,\nperftest's own as well, so a single cell says little.\n",
            bytes(VOLUME)
        );
        let heads = PAIRS.map(|pairs| format!(" {}: MB/s | h2d | d2h |", queue_pairs(pairs)));
        let _ = writeln!(text, "| size |{}\n|---|{}", heads.concat(), "---|".repeat(3 * PAIRS.len()));
        for size in SIZES {
            let cells = PAIRS.map(|pairs| {
                let base = self.point("ib_write_bw", size, pairs, 128);
                let share = |who| 100.0 * self.point(who, size, pairs, 128) / base;
                format!(" {base:.0} | {:.0} % | {:.0} % |", share("h2d"), share("d2h"))
            });
            let _ = writeln!(text, "| {} |{}", bytes(size), cells.concat());
        }
        let _ = writeln!(
            text,
            "\nBelow 64 KiB, a write costs rgpu more than perftest: it carries a header, takes a receive and a completion at the other end, and its slot is announced free again. Perftest's lands in memory that nobody looks at."
        );
    }

    fn depths(&self, text: &mut String, repetitions: usize) {
        let _ = writeln!(
            text,
            "\n## Bandwidth against depth\n\n![depth](verbs-depth.svg)\n\n{}, 2 queue pairs, medians of {repetitions} measurements:\n\n| depth | ib_write_bw, MB/s | h2d | d2h |\n|---|---|---|---|",
            bytes(DEPTH_SIZE)
        );
        for depth in DEPTHS {
            let base = self.point("ib_write_bw", DEPTH_SIZE, 2, depth);
            let share = |who| 100.0 * self.point(who, DEPTH_SIZE, 2, depth) / base;
            let _ = writeln!(text, "| {depth} | {base:.0} | {:.0} % | {:.0} % |", share("h2d"), share("d2h"));
        }
    }
}

fn queue_pairs(count: u32) -> String {
    if count == 1 { "1 queue pair".into() } else { format!("{count} queue pairs") }
}

fn median(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    if all.is_empty() { f64::NAN } else { (all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0 }
}

/// Median, least and most.
pub fn spread(all: impl Iterator<Item = f64>, digits: usize, unit: &str) -> String {
    let all: Vec<f64> = all.collect();
    let (least, most) =
        all.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(*v), b.max(*v)));
    format!("{:.digits$}{unit} ({least:.digits$} to {most:.digits$})", median(&all))
}

/// A size in words.
pub fn bytes(size: u64) -> String {
    if size < 1 << 20 { format!("{} KiB", size >> 10) } else { format!("{} MiB", size >> 20) }
}
