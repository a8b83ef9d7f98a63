//! Costs of a program's steady state, as counts instead of times: a loop of calls that need no answer makes
//! no round trip, however long it runs.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{LIMIT, built, counter as counter_of, run};
use rgpu_tests::tree;

/// The counters that a client prints after `bench loop NAME count` with a private server: one line for all,
/// and one for each driver API function. Lines of runtime functions count the same commands again.
fn stats(transport: &str, name: &str, count: u32) -> Result<Vec<String>> {
    stats_of(transport, "bench", &["loop", name, &count.to_string()])
}

/// The same for any program.
fn stats_of(transport: &str, program: &str, arguments: &[&str]) -> Result<Vec<String>> {
    stats_with(transport, program, arguments, "never")
}

/// The same with or without reading device code in the process: `RGPU_READ_IMAGES`.
fn stats_with(transport: &str, program: &str, arguments: &[&str], reads: &str) -> Result<Vec<String>> {
    let logs = tree::logs()
        .join("round-trips")
        .join(format!("{program}-{}-{transport}-{reads}", arguments.join("-")));
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["run", "--backend", "software", "--transport", transport, "--log-dir"])
        .arg(&logs)
        .arg("--")
        .arg(built(program)?)
        .args(arguments)
        .env("RGPU_LIB_DIR", tree::guest_libraries())
        .env("RGPU_STATS", "1")
        .env("RGPU_READ_IMAGES", reads);
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict(program).is_ok(), "{program} {arguments:?} over {transport}: {outcome:?}");
    let lines = outcome.stderr.lines().filter_map(|line| line.strip_prefix("rgpu: stats: "));
    let runtimes = |line: &str| line.starts_with("cuda") || line.starts_with("__cuda");
    Ok(lines.filter(|line| !runtimes(line)).map(str::to_owned).collect())
}

/// One of the client's counters, for the whole process.
fn counter(transport: &str, name: &str, count: u32, counter: &str) -> Result<u64> {
    counter_of(stats(transport, name, count)?.first().context("no counters")?, counter)
}

fn no_round_trip(name: &str) -> Result<()> {
    for transport in ["local", "tcp"] {
        let few = counter(transport, name, 10, "round_trips")?;
        let many = counter(transport, name, 300, "round_trips")?;
        assert_eq!(
            few,
            many,
            "{name} over {transport}: 290 more of them made {} more round trips",
            many - few
        );
        // The counters work: the calls themselves were counted.
        if name != "event_queries" {
            let commands = counter(transport, name, 300, "commands")?;
            assert!(commands >= 300, "{name} over {transport}: {commands} commands for 300 calls");
        }
    }
    Ok(())
}

#[test]
fn launches_need_no_round_trip() -> Result<()> {
    no_round_trip("launches")
}

#[test]
fn async_copies_both_ways_need_no_round_trip() -> Result<()> {
    no_round_trip("async_copies")
}

#[test]
fn event_records_need_no_round_trip() -> Result<()> {
    no_round_trip("event_records")
}

#[test]
fn event_queries_need_no_round_trip() -> Result<()> {
    no_round_trip("event_queries")
}

#[test]
fn small_pageable_copies_to_the_device_need_no_round_trip() -> Result<()> {
    no_round_trip("small_pageable")
}

#[test]
fn synchronous_copies_while_other_work_runs_need_no_round_trip() -> Result<()> {
    no_round_trip("launch_and_copy")
}

#[test]
fn allocating_and_freeing_needs_no_round_trip() -> Result<()> {
    no_round_trip("alloc_free")
}

/// How many answers a program waited for in `few` and in `many` steps.
fn waits(transport: &str, program: &str, way: &[&str], few: u32, many: u32) -> Result<[u64; 2]> {
    let of = |steps: u32| -> Result<u64> {
        let steps = steps.to_string();
        let arguments: Vec<&str> = way.iter().copied().chain([steps.as_str()]).collect();
        counter_of(stats_of(transport, program, &arguments)?.first().context("no counters")?, "round_trips")
    };
    Ok([of(few)?, of(many)?])
}

#[test]
fn repeated_queries_are_answered_in_the_process() -> Result<()> {
    for transport in ["local", "tcp"] {
        let [few, many] = waits(transport, "questions", &[], 16, 200)?;
        assert_eq!(few, many, "over {transport}: 184 more rounds made {} more round trips", many - few);
    }
    Ok(())
}

/// Checks how many answers each step of a framework waits for: only those that the program needs from the
/// server.
fn waits_of_a_step(name: &str, each: u64) -> Result<()> {
    for transport in ["local", "tcp"] {
        // The first steps learn everything about kernels, settings and sizes, and which times the program
        // asks for.
        let (few, many) = (20, 120);
        let [begun, ended] = waits(transport, "framework_steps", &[name], few, many)?;
        let (steps, waits) = (u64::from(many - few), ended - begun);
        assert_eq!(waits, each * steps, "{steps} steps of {name} over {transport} waited {waits} times");
    }
    Ok(())
}

#[test]
fn a_training_step_of_pytorch_waits_once() -> Result<()> {
    waits_of_a_step("training", 1)
}

#[test]
fn a_step_of_text_generation_waits_once() -> Result<()> {
    waits_of_a_step("decoding", 1)
}

#[test]
fn a_step_of_lammps_waits_once() -> Result<()> {
    waits_of_a_step("lammps", 1)
}

/// It waits for an event behind a grid, and for the stream with the forces. Times between events that it
/// records twice before it asks for them come with these waits, too.
#[test]
fn a_step_of_lammps_with_long_range_forces_waits_twice() -> Result<()> {
    waits_beside_those_for_an_event("lammps_grid", 100)
}

#[test]
fn inference_as_a_graph_waits_once() -> Result<()> {
    waits_of_a_step("graph", 1)
}

/// Only what has changed is sent, and nothing waits for it. A description of the whole graph would not fit
/// into a record.
#[test]
fn a_large_graph_that_changes_waits_for_its_result_only() -> Result<()> {
    waits_of_a_step("updated_graph", 1)?;
    for transport in ["local", "tcp"] {
        let copied = |steps: &str| -> Result<u64> {
            let lines = stats_of(transport, "framework_steps", &["updated_graph", steps])?;
            counter_of(lines.first().context("no counters")?, "copied_bytes")
        };
        let bytes = copied("60")? - copied("20")?;
        assert!(bytes < 40 * 1024, "over {transport}, 40 steps have copied {bytes} bytes");
    }
    Ok(())
}

/// Its inputs are copied on a stream that is waited for after each of them.
#[test]
fn a_token_of_llama_cpp_waits_once() -> Result<()> {
    waits_of_a_step("llama", 1)
}

/// The default stream waits for the stream that the program has waited for, which has nothing left.
#[test]
fn a_synchronous_copy_behind_a_stream_that_was_waited_for_does_not_wait() -> Result<()> {
    waits_of_a_step("blocking", 1)
}

#[test]
fn a_step_of_jax_waits_only_for_its_host_function() -> Result<()> {
    waits_of_a_step("xla", 0)
}

/// The stream is done when this process has copied the result from pinned memory to where it belongs.
#[test]
fn an_iteration_of_a_solver_as_a_graph_does_not_ask_whether_the_stream_is_done() -> Result<()> {
    waits_of_a_step("solver", 0)
}

/// What is copied after a wait, step after step, comes with the wait.
#[test]
fn a_small_result_comes_with_the_wait_before_it() -> Result<()> {
    waits_of_a_step("thrust", 1)
}

#[test]
fn results_that_are_copied_one_after_the_other_come_together() -> Result<()> {
    waits_of_a_step("results", 1)
}

/// The program checks what it has copied: bytes that came with a wait and were changed since are not used.
#[test]
fn results_that_change_after_the_wait_are_copied_again() -> Result<()> {
    for transport in ["local", "tcp"] {
        let [few, many] = waits(transport, "framework_steps", &["changes"], 24, 120)?;
        assert_eq!(many - few, 96 + 96 / 8, "over {transport}");
        for name in ["beside", "freed"] {
            stats_of(transport, "framework_steps", &[name, "200"])?;
        }
    }
    Ok(())
}

/// The maps of a kernel's operands are the same in every step.
#[test]
fn tensor_maps_are_made_once() -> Result<()> {
    waits_of_a_step("hopper", 1)
}

/// A step makes two. After every fiftieth step one of the buffers is another one, which takes a few waits.
#[test]
fn textures_of_the_same_buffers_are_made_once() -> Result<()> {
    for transport in ["local", "tcp"] {
        let [few, many] = waits(transport, "framework_steps", &["video"], 20, 120)?;
        let others = many - few - 100;
        assert!((2..=2 * 4).contains(&others), "over {transport}: {others} waits");
    }
    Ok(())
}

/// The memory stays the pool's, as its release threshold asks for.
#[test]
fn memory_of_a_pool_is_requested_once() -> Result<()> {
    waits_of_a_step("pools", 1)
}

#[test]
fn four_streams_of_cupy_are_waited_for_once() -> Result<()> {
    waits_of_a_step("cupy", 1)
}

#[test]
fn a_training_step_of_torch_compile_waits_once() -> Result<()> {
    waits_of_a_step("compiled", 1)?;
    waits_of_a_step("compiled_graphs", 1)
}

/// Checks steps that wait for an event each, unless that has come by then: the other waits of 100 of them are
/// these many.
fn waits_beside_those_for_an_event(name: &str, others: u64) -> Result<()> {
    /// All round trips, and those of waits for events.
    fn counts(transport: &str, name: &str, steps: u64) -> Result<[u64; 2]> {
        let lines = stats_of(transport, "framework_steps", &[name, &steps.to_string()])?;
        let all = counter_of(lines.first().context("no counters")?, "round_trips")?;
        let waits = lines.iter().find(|line| line.starts_with("cuEventSynchronize "));
        Ok([all, counter_of(waits.context("no line for cuEventSynchronize")?, "round_trips")?])
    }
    for transport in ["local", "tcp"] {
        let (few, many) = (20, 120);
        let (begun, ended) = (counts(transport, name, few)?, counts(transport, name, many)?);
        assert!(begun[1] <= few && ended[1] <= many, "over {transport}: {begun:?} {ended:?}");
        let counted = (begun[0] - begun[1], ended[0] - ended[1]);
        assert_eq!(counted.1 - counted.0, others, "over {transport}: {begun:?} {ended:?}");
    }
    Ok(())
}

/// It reads a number that comes with the wait for its event. After every fiftieth step two arrays come back.
#[test]
fn a_step_of_openmm_waits_once() -> Result<()> {
    waits_beside_those_for_an_event("openmm", 2 * 2)
}

/// BabelStream's dot product waits for its kernel, and then the program's first access gets both pages of
/// sums that the kernel has written to page-locked memory. The program has waited for its only stream, so
/// nothing is watched.
#[test]
fn sums_that_a_kernel_writes_to_page_locked_memory_come_at_once() -> Result<()> {
    waits_of_a_step("dot", 2)
}

/// The access to one of four pages gets the others as well, except the few times when it is learned again
/// which these are. Without that, a step makes five.
#[test]
fn pages_that_a_program_reads_after_each_wait_come_at_once() -> Result<()> {
    for transport in ["local", "tcp"] {
        let (few, many) = (20, 120);
        let [begun, ended] = waits(transport, "framework_steps", &["sums"], few, many)?;
        let (steps, waits) = (u64::from(many - few), ended - begun);
        assert!(waits <= 5 * steps / 2, "{steps} steps over {transport} waited {waits} times");
    }
    Ok(())
}

/// How often a step of `framework_steps` over `tcp` stops at a page, in a hundred of them.
fn faults_of_hundred_steps(name: &str) -> Result<u64> {
    let faults = |steps: u64| -> Result<u64> {
        let lines = stats_of("tcp", "framework_steps", &[name, &steps.to_string()])?;
        counter_of(lines.first().context("no counters")?, "page_faults")
    };
    Ok(faults(120)?.saturating_sub(faults(20)?))
}

/// In each step, a program and a running kernel tell each other something in seven pages, and the program
/// waits for the kernel. The pages stay with the program over the wait and the next launch, and the kernel's
/// changes come without being asked for: what remains is an access to write. Where the wait takes them, there
/// are three. The limit leaves room for a busy machine.
#[test]
fn the_pages_of_a_short_collective_stay_with_the_program() -> Result<()> {
    let faults = faults_of_hundred_steps("collective")?;
    assert!(faults <= 2 * 100, "the program stopped at pages {faults} times in 100 steps");
    Ok(())
}

/// The same without a wait: the pages stay with the program when it launches the next kernel, although it has
/// just written to one of them.
#[test]
fn pages_that_a_server_watches_stay_over_a_launch() -> Result<()> {
    let faults = faults_of_hundred_steps("answered")?;
    assert!(faults <= 2 * 100, "the program stopped at pages {faults} times in 100 steps");
    Ok(())
}

/// If another stream is not waited for, the program sees what its kernels write, even once it is destroyed.
#[test]
fn memory_that_an_ended_stream_changes_is_not_taken_for_settled() -> Result<()> {
    for transport in ["local", "tcp"] {
        stats_of(transport, "framework_steps", &["ended", "12"])?;
    }
    Ok(())
}

/// A step of OpenMM's constraints makes two waits for an event, and looks at a flag that a kernel sets: it
/// writes it once and reads it twice. Meanwhile the device works, so the server also watches the page. The
/// limit leaves room for a busy machine.
#[test]
fn a_flag_in_page_locked_memory_takes_few_round_trips() -> Result<()> {
    for transport in ["local", "tcp"] {
        let (few, many) = (20, 120);
        let [begun, ended] = waits(transport, "framework_steps", &["constraints"], few, many)?;
        let (steps, waits) = (u64::from(many - few), ended - begun);
        assert!(waits <= 8 * steps, "{steps} steps over {transport} waited {waits} times");
    }
    Ok(())
}

#[test]
fn the_time_of_a_call_is_counted_for_its_function() -> Result<()> {
    let lines = stats("local", "launches", 300)?;
    let launches = lines
        .iter()
        .find(|line| line.starts_with("cuLaunchKernel "))
        .context("no line for cuLaunchKernel")?;
    assert_eq!(counter_of(launches, "calls")?, 301, "{launches}");
    assert_eq!(counter_of(launches, "commands")?, 301, "{launches}");
    assert_eq!(counter_of(launches, "round_trips")?, 0, "{launches}");
    // The functions' counts together do not exceed the process's.
    for counter in ["commands", "round_trips", "doorbells", "system_calls", "copied_bytes"] {
        let sum = lines[1..].iter().map(|line| counter_of(line, counter)).sum::<Result<u64>>()?;
        assert!(sum <= counter_of(&lines[0], counter)?, "{counter}: {lines:#?}");
    }
    Ok(())
}

/// From its first call to its result, a program waits four times: for the descriptions of the server and its
/// device (one round trip), for memory, for its code with all functions' parameters and attributes, and for
/// the result. Queries about the device, the functions and the limits are answered from what came with these.
#[test]
fn a_program_waits_four_times_from_its_first_call_to_its_result() -> Result<()> {
    for transport in ["local", "tcp"] {
        let lines = stats_of(transport, "vectorAdd", &[])?;
        let of = |line: &str, name| counter_of(line, name);
        let answered: Vec<&str> = lines[1..]
            .iter()
            .filter(|line| !matches!(of(line, "exchanges"), Ok(0)))
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(answered, ["cuMemAlloc_v2", "cuLibraryLoadData", "cuMemcpyDtoH_v2"], "{lines:#?}");
        // Starting the session counts for no function.
        assert_eq!((of(&lines[0], "exchanges")?, of(&lines[0], "round_trips")?), (4, 5), "{lines:#?}");
    }
    Ok(())
}

/// The round trips of a program that reads its device code: of all functions and the session's start
/// together, and of each function that waits.
fn waits_with_images_read(
    transport: &str,
    program: &str,
    arguments: &[&str],
) -> Result<(u64, BTreeMap<String, u64>)> {
    let lines = stats_with(transport, program, arguments, "always")?;
    let mut functions = BTreeMap::new();
    for line in &lines[1..] {
        let (name, waits) =
            (line.split(' ').next().context("no function")?, counter_of(line, "round_trips")?);
        if waits > 0 {
            // One function under two names.
            functions.insert(name.trim_end_matches("_v2").to_owned(), waits);
        }
    }
    Ok((counter_of(lines.first().context("no counters")?, "round_trips")?, functions))
}

/// Checks that these functions make this many round trips, the session's start two, and nothing else any.
fn only_these_wait(
    transport: &str,
    program: &str,
    arguments: &[&str],
    expected: &[(&str, u64)],
) -> Result<()> {
    let (all, functions) = waits_with_images_read(transport, program, arguments)?;
    let expected: BTreeMap<String, u64> =
        expected.iter().map(|(name, waits)| ((*name).to_owned(), *waits)).collect();
    assert_eq!(functions, expected, "{program} {arguments:?} over {transport}");
    assert_eq!(all, 2 + expected.values().sum::<u64>(), "{program} {arguments:?} over {transport}");
    Ok(())
}

/// Copying a model tensor by tensor, loading libraries, asking for their kernels, attributes and occupancy,
/// and the first launches wait for nothing. Only the number of clusters that run at once is asked for: once
/// for all sizes, and once for the sizes of a kernel that only the driver knows.
#[test]
fn libraries_that_are_read_in_the_process_are_not_waited_for() -> Result<()> {
    let expected = [
        ("cuMemAlloc", 1),
        ("cuCtxSynchronize", 1),
        // The program looks for its own code in its file and finds other code first.
        ("cuLibraryLoadData", 1),
        ("cuLibraryUnload", 1),
        ("cuOccupancyMaxActiveClusters", 2),
        // PTX.
        ("cuModuleLoadData", 1),
        // Only the last copy waits: those of the tensors before it do not.
        ("cuStreamSynchronize", 1),
        // The result, and the model in two parts.
        ("cuMemcpyDtoH", 3),
    ];
    for transport in ["local", "tcp"] {
        for libraries in ["2", "40"] {
            only_these_wait(transport, "first_steps", &[libraries], &expected)?;
        }
    }
    Ok(())
}

/// A program that reads its device code waits for memory, for its variables and for its results, but not for
/// its module or the first launch.
#[test]
fn a_module_and_its_first_launch_are_not_waited_for() -> Result<()> {
    for transport in ["local", "tcp"] {
        only_these_wait(transport, "vectorAdd", &[], &[("cuMemAlloc", 1), ("cuMemcpyDtoH", 1)])?;
        let of_variables =
            [("cuLibraryGetGlobal", 7), ("cuMemAlloc", 1), ("cuMemcpyDtoH", 9), ("cuMemcpyDtoHAsync", 1)];
        only_these_wait(transport, "globals", &[], &of_variables)?;
    }
    Ok(())
}

/// What a program reads from images itself equals what the server reports.
#[test]
fn code_read_in_the_process_gives_what_the_server_reports() -> Result<()> {
    for reads in ["never", "auto", "always", "check"] {
        stats_with("local", "first_steps", &["3"], reads)?;
        stats_with("local", "libraries", &[], reads)?;
    }
    Ok(())
}

/// Nothing crosses the network for pinned memory that is zero on both sides, however the program made it so.
#[test]
fn clearing_pinned_memory_sends_nothing() -> Result<()> {
    let lines = stats_of("tcp", "mapped_zeroes", &["cleared"])?;
    let total = lines.first().context("no counters")?;
    let bytes = counter_of(total, "mirror_bytes")?;
    ensure!(bytes <= 1 << 20, "{bytes} bytes of 4 MiB of zeroes: {total}");
    Ok(())
}

/// A flag in pinned memory stays with the program from launch to launch, until a kernel sets it. The limit
/// leaves room for a busy machine: what nothing changes is taken away after a while.
#[test]
fn a_look_at_a_flag_after_each_launch_asks_for_nothing() -> Result<()> {
    let exchanges = |steps: u64| -> Result<u64> {
        let lines = stats_of("tcp", "framework_steps", &["flags", &steps.to_string()])?;
        counter_of(lines.first().context("no counters")?, "exchanges")
    };
    let (few, many) = (100, 600);
    let more = exchanges(many)?.saturating_sub(exchanges(few)?);
    assert!(more <= (many - few) / 2, "{} launches and looks took {more} exchanges", many - few);
    Ok(())
}

/// What each chunk costs that the program and a running kernel pass to each other through pinned memory over
/// a network: exchanges and bytes.
fn costs_of_a_chunk(way: &str, bytes: u64) -> Result<[u64; 2]> {
    let (few, many) = (16, 64);
    let counts = |chunks: u64| -> Result<[u64; 2]> {
        let lines = stats_of("tcp", "mapped_fifo", &[&format!("{way}-{bytes}-{chunks}")])?;
        let total = lines.first().context("no counters")?;
        Ok([counter_of(total, "exchanges")?, counter_of(total, "mirror_bytes")?])
    };
    let (begun, ended) = (counts(few)?, counts(many)?);
    Ok([0, 1].map(|n| ended[n].saturating_sub(begun[n]) / (many - few)))
}

/// A chunk from a kernel: the server reports the flag, and the bytes come in two parts, of which the second
/// shows that the program reads on. A chunk to a kernel: nothing has to be fetched, because the program keeps
/// the pages. The limits leave room for a busy machine.
#[test]
fn chunks_in_pinned_memory_take_few_exchanges() -> Result<()> {
    let bytes = 512 << 10;
    let [exchanges, moved] = costs_of_a_chunk("out", bytes)?;
    assert!(exchanges <= 12, "a chunk from a kernel took {exchanges} exchanges");
    assert!(moved <= bytes * 3 / 2, "a chunk of {bytes} bytes from a kernel moved {moved} bytes");
    let [exchanges, moved] = costs_of_a_chunk("in", bytes)?;
    assert!(exchanges <= 10, "a chunk to a kernel took {exchanges} exchanges");
    assert!(moved <= bytes * 2, "a chunk of {bytes} bytes to a kernel moved {moved} bytes");
    let [exchanges, moved] = costs_of_a_chunk("both", 8)?;
    assert!(exchanges <= 6, "a word each way took {exchanges} exchanges");
    assert!(moved <= 16 << 10, "a word each way moved {moved} bytes");
    Ok(())
}
