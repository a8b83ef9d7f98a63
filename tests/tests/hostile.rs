//! Hostile clients, bridges and unknown peers. For each attack, a log line must say what was wrong, only the
//! attacker's session may end, and nothing may be left behind.
//!
//! Both daemons are real, and the workers use a GPU in software. CUDA programs run during the attacks, and
//! their results are checked.

mod support;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use protocol::Status;
use protocol::channel::{Geometry, NO_SLOT};
use protocol::data::{HostIn, HostOut, HostRange, Place};
use protocol::device::{Answer, request, text};
use protocol::handle::{ContextId, EventId, FunctionId, ModuleId, StreamId};
use protocol::link::{
    self, COMPRESSED_FLAG, DataAsk, DataHeader, EAGER_FLAG, FrameHeader, HASH_FLAG, Hello, KNOWN_FLAG, frame,
    purpose,
};
use protocol::native::Request;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD, Memset};
use protocol::ops::event::{EventRecord, EventSynchronize};
use protocol::ops::launch::Launch;
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use protocol::ops::module::{ModuleInfo, ModuleLoad, ModuleUnload};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::ops::{Op, encode};
use support::client::Client;
use support::{Bystanders, PATIENCE, Rig, TRANSPORTS, Transport, eventually};
use test_kit::link::{TcpBridge, connect_tcp, connect_tcp_from, hear_welcome, hello, say_hello};
use test_kit::native_client::{NativeClient, create_channel};
use test_kit::{memfd, sealed_memfd};
use zerocopy::IntoBytes;

/// Attacks while other programs run. They must not be affected, and nothing may be left behind.
fn attack(name: &str, attack: impl FnOnce(&Rig) -> Result<()>) -> Result<()> {
    besieged(name, |rig| {
        let bystanders = Bystanders::start(rig)?;
        let result = attack(rig);
        bystanders.check()?;
        result
    })
}

/// Attacks daemons that have served programs. Afterwards they must still serve, and must hold no more
/// resources than before.
fn besieged(name: &str, siege: impl FnOnce(&Rig) -> Result<()>) -> Result<()> {
    // The grace period is how long a session is kept whose connections close without a `BYE`. It is also how
    // long a busy machine may take to bring back a bystander's link. A test exceeds the eager data that every
    // server accepts.
    let mut rig =
        Rig::with(&format!("hostile-{name}"), &["--grace-seconds", "20", "--ahead-memory", "16M"], &[])?;
    for transport in TRANSPORTS {
        rig.passes(transport, "vectorAdd", &[])?;
    }
    let before = rig.idle_holdings()?;
    siege(&rig)?;
    for transport in TRANSPORTS {
        rig.passes(transport, "vectorAdd", &[])?;
    }
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

/// Waits for a line in a daemon's log that contains all of `words`.
fn logged(daemon: &rgpu_tests::daemons::Daemon, words: &[&str]) -> Result<()> {
    eventually(|| {
        let log = daemon.log_text();
        ensure!(
            log.lines().any(|line| words.iter().all(|word| line.contains(word))),
            "no line with {words:?} in the log:\n{log}"
        );
        Ok(())
    })
}

/// An attack through a channel that ends the session, and the words that the log must have about it.
struct Deed {
    name: &'static str,
    says: &'static str,
    act: fn(&mut Client) -> Result<()>,
}

fn range(place: Place, offset: u64, len: u64) -> HostRange {
    HostRange { place, offset, len }
}

fn read_from(client: &mut Client, place: Place, offset: u64, len: u64) -> Result<()> {
    let src = HostIn::Range(range(place, offset, len));
    client.tell(&MemcpyHtoD { stream: StreamId(0), dst: window(0), src })
}

fn write_to(client: &mut Client, place: Place, offset: u64, len: u64) -> Result<()> {
    client.tell(&MemcpyDtoH { stream: StreamId(0), src: window(0), dst: HostOut(range(place, offset, len)) })
}

/// Allocates device memory, so that only the client's side of a copy is wrong.
fn some_memory(client: &mut Client) -> Result<()> {
    let granule = 2 << 20;
    client.call(&MemGrow { device: 0, address: window(0), size: 8 * granule })??;
    client.tell(&MemAlloc { address: window(0), size: 8 * granule })
}

const MARK: u16 = <StreamMark as Op>::INFO.opcode;
const SYNCHRONIZE: u16 = <StreamSynchronize as Op>::INFO.opcode;
const LAUNCH: u16 = <Launch<'_> as Op>::INFO.opcode;

const DEEDS: &[Deed] = &[
    Deed {
        name: "wild-size",
        says: "size 0xfffffff0",
        act: |c| c.raw(0xffff_fff0, MARK, NO_SLOT, 1, &[0; 16], 32),
    },
    Deed { name: "no-size", says: "size 0x0 ", act: |c| c.raw(0, MARK, NO_SLOT, 1, &[0; 16], 32) },
    Deed { name: "odd-size", says: "size 0x18 ", act: |c| c.raw(0x18, MARK, NO_SLOT, 1, &[0; 16], 32) },
    Deed { name: "beyond-tail", says: "size 0x40 ", act: |c| c.raw(0x40, MARK, NO_SLOT, 1, &[0; 16], 32) },
    Deed {
        name: "wild-padding",
        says: "size 0xfffffff0",
        act: |c| c.raw(0xffff_fff0, 0, NO_SLOT, 0, &[0; 16], 32),
    },
    Deed { name: "opcode-ffff", says: "unknown opcode 0xffff", act: |c| c.record(0xffff, NO_SLOT, &[]) },
    Deed { name: "opcode-ffff-slot", says: "unknown opcode 0xffff", act: |c| c.record(0xffff, 3, &[1; 100]) },
    Deed {
        name: "slot-64",
        says: "names reply slot 64, which does not exist",
        act: |c| c.push(&StreamSynchronize { stream: StreamId(0) }, 64),
    },
    Deed {
        name: "slot-65534",
        says: "names reply slot 65534, which does not exist",
        act: |c| c.push(&StreamSynchronize { stream: StreamId(0) }, 65534),
    },
    Deed { name: "async-with-slot", says: "stream_mark", act: |c| c.record(MARK, 3, &[0; 4]) },
    Deed {
        name: "sync-without-slot",
        says: "stream_synchronize",
        act: |c| c.record(SYNCHRONIZE, NO_SLOT, &[0; 4]),
    },
    Deed {
        name: "seq-gap",
        says: "record with seq 2 where 1 was expected",
        act: |c| c.raw(32, MARK, NO_SLOT, 2, &[0; 4], 32),
    },
    Deed {
        name: "seq-zero",
        says: "record with seq 0 where 1 was expected",
        act: |c| c.raw(32, MARK, NO_SLOT, 0, &[0; 4], 32),
    },
    Deed { name: "cursor-far", says: "ring cursor 0x10000000000 does not fit", act: |c| c.set_tail(1 << 40) },
    Deed { name: "cursor-odd", says: "ring cursor 0x8 does not fit", act: |c| c.set_tail(8) },
    Deed {
        name: "cursor-back",
        says: "ring cursor 0xfffffffffffffff0 does not fit",
        act: |c| c.set_tail(u64::MAX - 15),
    },
    Deed { name: "no-body", says: "launch", act: |c| c.record(LAUNCH, NO_SLOT, &[]) },
    Deed {
        name: "cut-body",
        says: "launch",
        act: |c| {
            let mut body = Vec::new();
            let launch = Launch {
                function: FunctionId(0),
                stream: StreamId(0),
                grid: [1; 3],
                block: [1; 3],
                dynamic_shared: 0,
                attributes: vec![],
                params: &[1; 500],
            };
            encode(&launch, &mut body);
            c.record(LAUNCH, NO_SLOT, &body[..100])
        },
    },
    Deed {
        name: "wild-count",
        says: "launch",
        act: |c| {
            // The number of attributes: four thousand million.
            c.record(LAUNCH, NO_SLOT, &[[0u8; 40].as_slice(), &[0xff; 4]].concat())
        },
    },
    Deed {
        name: "kind-of-data",
        says: "kind of data reference",
        act: |c| c.record(<MemcpyHtoD<'_> as Op>::INFO.opcode, NO_SLOT, &[&[0u8; 12][..], &[9; 24]].concat()),
    },
    Deed {
        name: "region-unknown",
        says: "region(77)",
        act: |c| {
            some_memory(c)?;
            read_from(c, Place::Region(77), 0, 64)
        },
    },
    Deed {
        name: "region-unknown-out",
        says: "region(77)",
        act: |c| {
            some_memory(c)?;
            write_to(c, Place::Region(77), 0, 64)
        },
    },
    Deed {
        name: "arena-beyond",
        says: "arena",
        act: |c| {
            some_memory(c)?;
            read_from(c, Place::Arena, (4 << 20) - 63, 64)
        },
    },
    Deed {
        name: "arena-beyond-out",
        says: "arena",
        act: |c| {
            some_memory(c)?;
            write_to(c, Place::Arena, 4 << 20, 1)
        },
    },
    Deed {
        name: "arena-length",
        says: "arena",
        act: |c| {
            some_memory(c)?;
            read_from(c, Place::Arena, 1, 8 << 20)
        },
    },
    Deed {
        name: "offset-wraps",
        says: "offset of data reference",
        act: |c| read_from(c, Place::Arena, u64::MAX, 2),
    },
];

fn commit(rig: &Rig, transport: Transport, deed: &Deed) -> Result<()> {
    let mut client = Client::connect(&rig.socket(transport), deed.name)?;
    (deed.act)(&mut client)?;
    let reason = client.lost()?;
    let says = deed.says.to_lowercase();
    ensure!(reason.to_lowercase().contains(&says), "the client was told: {reason}");
    // The daemon closes the connection, and its log says which client it lost and why.
    ensure!(client.connection.response()?.is_none(), "the connection stays open");
    eventually(|| {
        let log = rig.bridge(transport).log_text();
        let said = log.lines().any(|line| {
            line.contains("session lost")
                && line.contains(&format!("program={} ", deed.name))
                && line.to_lowercase().contains(&says)
        });
        ensure!(said, "the log does not say {:?} of {}:\n{log}", deed.says, deed.name);
        Ok(())
    })
}

#[test]
fn a_malformed_command_ends_its_session_with_the_reason_in_the_log() -> Result<()> {
    attack("commands", |rig| {
        let mut wrong = Vec::new();
        for transport in TRANSPORTS {
            for deed in DEEDS {
                if let Err(error) = commit(rig, transport, deed) {
                    wrong.push(format!("{} over {transport:?}: {error:#}", deed.name));
                }
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    })
}

const PTX: &str = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry nothing(.param .u64 a, .param .u32 b)\n{\n ret;\n}\n\0";

#[test]
fn unknown_handles_and_wrong_parameters_are_answered_with_cudas_codes() -> Result<()> {
    attack("handles", |rig| {
        for transport in TRANSPORTS {
            let mut client = Client::connect(&rig.socket(transport), "handles")?;
            let c = &mut client;
            let error = |c: &mut Client| -> Result<Option<Status>> {
                c.call(&StreamSynchronize { stream: StreamId(0) })?.ok();
                Ok(c.take_error(0))
            };
            for stream in [63, 64, 7679, 7680, u32::MAX] {
                let answer = c.call(&StreamSynchronize { stream: StreamId(stream) })?;
                ensure!(answer.is_err_and(|status| status == Status::INVALID_HANDLE), "stream {stream}");
            }
            ensure!(
                c.call(&EventSynchronize { event: EventId(99) })?.is_err_and(|s| s == Status::INVALID_HANDLE),
                "event"
            );
            let info = HostOut(range(Place::Arena, 0, 4096));
            ensure!(
                c.call(&ModuleInfo { module: ModuleId(5), info })?
                    .is_err_and(|s| s == Status::INVALID_HANDLE),
                "module"
            );

            let launch = |module: u32, index: u32, params: &'static [u8]| Launch {
                function: FunctionId::new(ModuleId(module), index),
                stream: StreamId(0),
                grid: [1; 3],
                block: [1; 3],
                dynamic_shared: 0,
                attributes: vec![],
                params,
            };
            c.tell(&launch(5, 0, &[0; 12]))?;
            ensure!(
                error(c)?.is_some_and(|s| s == Status::INVALID_HANDLE),
                "a function of an unknown module"
            );
            c.tell(&ModuleUnload { module: ModuleId(5) })?;
            ensure!(error(c)?.is_some_and(|s| s == Status::INVALID_HANDLE), "unloading an unknown module");
            c.tell(&EventRecord { event: EventId(99), stream: StreamId(0), flags: 0 })?;
            ensure!(error(c)?.is_some_and(|s| s == Status::INVALID_HANDLE), "recording an unknown event");
            c.tell(&Memset {
                stream: StreamId(0),
                dst: 0xdead_0000,
                pitch: 0,
                value: 0,
                element: 4,
                width: 16,
                height: 1,
            })?;
            ensure!(error(c)?.is_some(), "filling memory that does not exist");

            let image = HostIn::Inline(PTX.as_bytes());
            c.call(&ModuleLoad {
                context: ContextId(0),
                module: ModuleId(5),
                options: vec![],
                image,
                info,
            })??;
            let again = c.call(&ModuleLoad {
                context: ContextId(0),
                module: ModuleId(5),
                options: vec![],
                image,
                info,
            })?;
            ensure!(again.is_err(), "a module name in use");
            c.tell(&launch(5, 1, &[0; 12]))?;
            ensure!(error(c)?.is_some(), "a function beyond the module's table");
            for params in [&[][..], &[0; 13], &[0; 4096]] {
                c.tell(&launch(5, 0, params))?;
                ensure!(error(c)?.is_some(), "{} bytes of parameters instead of 12", params.len());
            }
            // Missing bytes at the end count as zero.
            for params in [&[0; 3][..], &[0; 11]] {
                c.tell(&launch(5, 0, params))?;
                ensure!(
                    error(c)?.is_none(),
                    "{} bytes of parameters instead of 12 are refused",
                    params.len()
                );
            }
            // After all that, correct commands still work.
            c.tell(&launch(5, 0, &[0; 12]))?;
            ensure!(error(c)?.is_none() && c.reason().is_none(), "a right launch: {:?}", c.reason());
        }
        Ok(())
    })
}

#[test]
fn memory_that_is_not_a_channel_is_refused() -> Result<()> {
    attack("memory", |rig| {
        for transport in TRANSPORTS {
            let socket = rig.socket(transport);
            let usual = Geometry::with_arena(1 << 20);
            let size = usual.size as u64;
            let connection = NativeClient::connect(&socket)?;
            let refused = |request: Request, fds: &[&OwnedFd], answer: Answer, word: &str| -> Result<()> {
                let (got, reason) = connection.ask(request, fds)?;
                ensure!(
                    got == answer && reason.contains(word),
                    "{got:?} {reason:?} instead of {answer:?} {word:?}"
                );
                logged(rig.bridge(transport), &[word])
            };
            let (sealed, unsealed) = (sealed_memfd(size), memfd(size));
            let file = OwnedFd::from(std::fs::File::open("/dev/null")?);
            refused(create_channel(size), &[&unsealed], Answer::Invalid, "not sealed against shrinking")?;
            refused(create_channel(size), &[&file], Answer::Invalid, "not a memfd")?;
            refused(create_channel(size), &[], Answer::Invalid, "exactly one file descriptor")?;
            refused(create_channel(size + 4096), &[&sealed], Answer::Invalid, "file of")?;
            refused(
                Request { offset: u64::MAX - 4095, ..create_channel(size) },
                &[&sealed],
                Answer::Invalid,
                "not a range of a memfd",
            )?;
            refused(create_channel(u64::MAX), &[&sealed], Answer::NoResources, "the limit is")?;
            refused(create_channel(size), &[&sealed], Answer::Invalid, "does not begin with rGPUchan")?;
            refused(create_channel(100), &[&sealed], Answer::Invalid, "no room for its header")?;

            let good = usual.fields(1, "wild");
            let bad = [
                ("the ring", link_fields(&good, |f| f.ring_size = 0)),
                ("the ring", link_fields(&good, |f| f.ring_size = 3 << 20)),
                ("the ring", link_fields(&good, |f| f.ring_offset = 0)),
                ("reply slots", link_fields(&good, |f| f.slot_count = 0)),
                ("reply slots", link_fields(&good, |f| f.slot_count = u32::MAX)),
                ("reply slots", link_fields(&good, |f| f.slots_offset = 4096)),
                ("the progress area", link_fields(&good, |f| f.progress_size = 1)),
                ("the progress area", link_fields(&good, |f| f.progress_offset = !4095)),
                ("the arena", link_fields(&good, |f| f.arena_size = u32::MAX)),
                ("the channel", link_fields(&good, |f| f.size = u64::MAX)),
                ("version 99.0", link_fields(&good, |f| f.version = OTHER)),
                ("different sources", link_fields(&good, |f| f.fingerprint = !f.fingerprint)),
            ];
            for (word, fields) in bad {
                let (client, answer, reason) = Client::try_connect(&socket, 1 << 20, &fields)?;
                ensure!(
                    client.is_none() && answer != Answer::Ok && reason.contains(word),
                    "{word}: {answer:?} {reason}"
                );
                logged(rig.bridge(transport), &[word])?;
            }

            // A valid session, and invalid regions.
            let client = Client::connect(&socket, "regions")?;
            let region = |offset, size| Request {
                kind: request::REGISTER_MEMORY,
                region: 3,
                offset,
                ..create_channel(size)
            };
            for (request, fd) in [
                (region(0, 4096), &unsealed),
                (region(0, size * 2), &sealed),
                (region(1, 4096), &sealed),
                (region(0, 0), &sealed),
                (region(0, 1 << 60), &sealed),
            ] {
                let (answer, reason) = client.connection.ask(request, &[fd])?;
                ensure!(answer == Answer::Invalid, "{request:?}: {answer:?} {reason}");
            }
            ensure!(client.reason().is_none(), "the session was lost: {:?}", client.reason());
        }
        Ok(())
    })
}

fn link_fields(
    good: &protocol::channel::HeaderFields,
    change: impl FnOnce(&mut protocol::channel::HeaderFields),
) -> protocol::channel::HeaderFields {
    let mut fields = *good;
    change(&mut fields);
    fields
}

#[test]
fn memory_that_changes_while_it_is_read_affects_only_its_own_session() -> Result<()> {
    attack("changing", |rig| {
        for round in 0..6u64 {
            for transport in TRANSPORTS {
                let mut client = Client::connect(&rig.socket(transport), "changing")?;
                some_memory(&mut client)?;
                client.call(&StreamSynchronize { stream: StreamId(0) })?.ok();
                let (ring, progress, all) =
                    (client.geometry.ring_offset, client.geometry.progress_offset, client.geometry.size);
                let stop = Arc::new(AtomicBool::new(false));
                std::thread::scope(|scope| -> Result<()> {
                    let scribbling = Arc::clone(&stop);
                    let scribbler = scope.spawn({
                        let client = &client;
                        move || {
                            let mut x = round * 0x9e37_79b9 + 1;
                            while !scribbling.load(Ordering::Relaxed) {
                                x ^= x << 13;
                                x ^= x >> 7;
                                x ^= x << 17;
                                let place = match round % 3 {
                                    0 => ring + (x as usize % 4096),
                                    1 => progress + (x as usize % 65536),
                                    _ => 4096 + x as usize % (all - 4104),
                                };
                                // Sometimes random, sometimes almost valid.
                                let value = if x & 0x100 == 0 { x } else { x & 0xffff_0000_00f0 | 0x10 };
                                client.word(place & !7).store(value, Ordering::Relaxed);
                            }
                        }
                    });
                    std::thread::sleep(Duration::from_millis(20));
                    // Only the tail moves. The records before it are whatever was written there last.
                    for step in 1..400u64 {
                        client.word(0x100).fetch_add(16 * (1 + step % 8), Ordering::Release);
                        client.ring()?;
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    stop.store(true, Ordering::Relaxed);
                    scribbler.join().map_err(|_| anyhow::anyhow!("the scribbler panicked"))
                })?;
                client.lost()?;
            }
        }
        Ok(())
    })
}

#[test]
fn floods_of_connections_and_requests_are_refused_and_leave_nothing_behind() -> Result<()> {
    besieged("flood", |rig| {
        // Sessions that are open before the flood. Once the limit on clients is reached, no other can begin.
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<()> {
            let bystanders = scope.spawn(|| {
                let results = std::thread::scope(|scope| {
                    TRANSPORTS
                        .map(|t| scope.spawn(move || rig.passes(t, "launch_storm", &["200000"])))
                        .map(|thread| thread.join())
                });
                done.store(true, Ordering::Relaxed);
                for result in results {
                    result.map_err(|_| anyhow::anyhow!("a bystander's thread panicked"))??;
                }
                anyhow::Ok(())
            });
            for transport in TRANSPORTS {
                eventually(|| {
                    let status = rig.bridge(transport).status()?;
                    ensure!(
                        done.load(Ordering::Relaxed)
                            || status["sessions"].to_string().contains("launch_storm"),
                        "no bystander over {transport:?}"
                    );
                    Ok(())
                })?;
            }
            let mut rounds = 0;
            while rounds == 0 || !done.load(Ordering::Relaxed) {
                flood(rig)?;
                rounds += 1;
            }
            bystanders.join().map_err(|_| anyhow::anyhow!("the bystanders panicked"))?
        })?;
        // The logs must not be flooded either.
        for transport in TRANSPORTS {
            let bytes = rig.bridge(transport).log_text().len();
            ensure!(bytes < 4 << 20, "{bytes} bytes of log");
        }
        Ok(())
    })
}

fn flood(rig: &Rig) -> Result<()> {
    for transport in TRANSPORTS {
        let socket = rig.socket(transport);
        let open: Vec<NativeClient> =
            (0..400).map(|_| NativeClient::connect(&socket)).collect::<std::io::Result<_>>()?;
        logged(rig.bridge(transport), &["refused", "max_channels"])?;
        // Every refused client is told why.
        let (answer, reason, _) = open[399].response()?.context("closed without a word")?;
        ensure!(answer == Answer::NoResources && reason.contains("max_channels"), "{answer:?} {reason}");
        drop(open);
        eventually(|| {
            let connection = NativeClient::connect(&socket)?;
            let (answer, reason) = connection.ask(Request { magic: 0, ..create_channel(0) }, &[])?;
            ensure!(answer == Answer::Invalid, "{answer:?} {reason}");
            Ok(())
        })?;

        // A flooding client reads nothing, and is disconnected when its answers have filled the socket.
        for _ in 0..20 {
            let connection = NativeClient::connect(&socket)?;
            let refused = (0..20_000).find_map(|_| connection.send(&[0xee; 40], &[]).err());
            let refused = refused.context("the daemon took every request")?;
            // The socket is shut down, and closed a moment later.
            let gone = [std::io::ErrorKind::BrokenPipe, std::io::ErrorKind::ConnectionReset];
            ensure!(gone.contains(&refused.kind()), "{refused}");
        }
        logged(rig.bridge(transport), &["native client", "begins with rGPUnatv"])?;
    }
    Ok(())
}

/// Where an attacker's connections come from.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

#[test]
fn silent_connections_are_closed() -> Result<()> {
    attack("silent", |rig| {
        let native: Vec<NativeClient> = TRANSPORTS
            .iter()
            .flat_map(|&t| (0..20).map(move |_| rig.socket(t)))
            .map(|s| NativeClient::connect(&s))
            .collect::<std::io::Result<_>>()?;
        // More connections than one source may have. They push out others of their own source, but not those
        // of the bystanders.
        let mut tcp: Vec<TcpStream> =
            (0..200).map(|_| connect_tcp_from(ATTACKER, rig.port)).collect::<std::io::Result<_>>()?;
        let mut unix: Vec<UnixStream> =
            (0..50).map(|_| Ok(UnixStream::connect(rig.server_socket())?)).collect::<Result<_>>()?;
        // Some send a part of a hello, unless they are closed already.
        for stream in tcp.iter_mut().step_by(2) {
            let _ = stream.write_all(&link::MAGIC.to_le_bytes());
        }
        for stream in &mut tcp {
            // A connection that is closed with unread input ends in a reset.
            let read = stream.read(&mut [0; 400]);
            ensure!(
                matches!(read, Ok(0)) || read.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
                "the server answered"
            );
        }
        for stream in &mut unix {
            stream.set_read_timeout(Some(PATIENCE))?;
            ensure!(stream.read(&mut [0; 400])? == 0, "the server answered");
        }
        logged(&rig.server, &["handshake", "no hello within"])?;
        drop(native);
        Ok(())
    })
}

/// A version that does not exist.
const OTHER: protocol::Version = protocol::Version { major: 99, minor: 0 };

/// The hello of a peer that the server does not know.
fn unknown(purpose: u32) -> Hello {
    hello(purpose, [0; 16], 2)
}

#[test]
fn unknown_peers_at_the_servers_sockets_are_refused_or_disconnected() -> Result<()> {
    attack("strangers", |rig| {
        for rubbish in [&b"GET / HTTP/1.1\r\nHost: gpu\r\n\r\n"[..], &[0; 500], &[0xff; 5000]] {
            let mut tcp = connect_tcp(rig.port)?;
            tcp.write_all(rubbish)?;
            // A connection that is closed with unread input ends in a reset.
            let read = tcp.read(&mut [0; 400]);
            ensure!(
                matches!(read, Ok(0)) || read.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
                "answered rubbish"
            );
            let mut unix = UnixStream::connect(rig.server_socket())?;
            // The server may close before it has read everything.
            let _ = unix.write_all(rubbish);
            unix.set_read_timeout(Some(PATIENCE))?;
            let read = unix.read(&mut [0; 400]);
            ensure!(!read.is_ok_and(|n| n > 0), "answered rubbish");
        }
        logged(&rig.server, &["handshake", "does not speak rgpu"])?;

        let refused = |hello: Hello, answer: Answer, word: &str| -> Result<()> {
            let tcp = connect_tcp(rig.port)?;
            say_hello(&tcp, &hello)?;
            let welcome = hear_welcome(&tcp)?;
            let reason = protocol::device::untext(&welcome.reason);
            ensure!(
                Answer::from_number(welcome.status) == answer && reason.contains(word),
                "{} {reason}",
                welcome.status
            );
            ensure!(welcome.version == protocol::VERSION, "version {}", welcome.version);
            logged(&rig.server, &["refused", word])
        };
        refused(Hello { version: OTHER, ..unknown(purpose::CONTROL) }, Answer::Version, "version 99.0")?;
        refused(Hello { fingerprint: 1, ..unknown(purpose::CONTROL) }, Answer::Version, "different sources")?;
        refused(unknown(77), Answer::Invalid, "purpose 77")?;
        refused(unknown(purpose::LOCAL), Answer::Invalid, "not served over tcp")?;
        // A token that no session has, and all zeros.
        refused(
            Hello { token: [0x5a; 16], ..unknown(purpose::DATA) },
            Answer::Denied,
            "no session has this token",
        )?;
        refused(unknown(purpose::DATA), Answer::Denied, "no session has this token")?;

        // The first twelve bytes of another version's hello are enough for an answer.
        let mut tcp = connect_tcp(rig.port)?;
        tcp.write_all(&Hello { version: OTHER, ..unknown(purpose::CONTROL) }.as_bytes()[..12])?;
        ensure!(
            Answer::from_number(hear_welcome(&tcp)?.status) == Answer::Version,
            "another version's short hello"
        );
        Ok(())
    })
}

/// Sends a chunk of data.
fn chunk(bridge: &TcpBridge, seq: u64, piece: u32, offset: u64, len: u32, bytes: &[u8]) -> Result<()> {
    Ok(bridge.send_data(0, DataHeader { seq, offset, piece, len }, bytes)?)
}

/// Appends an operation as the command `seq`.
fn command<'a, T: Op<'a>>(bridge: &TcpBridge, seq: u64, slot: u16, op: &T) -> Result<()> {
    let mut body = Vec::new();
    encode(op, &mut body);
    Ok(bridge.record(seq, T::INFO.opcode, slot, &body)?)
}

/// Allocates device memory and appends a copy of 64 bytes to it as command 3. The copy's data does not come
/// yet.
fn begin_copy(bridge: &TcpBridge) -> Result<()> {
    command(bridge, 1, 0, &MemGrow { device: 0, address: window(0), size: 2 << 20 })?;
    command(bridge, 2, NO_SLOT, &MemAlloc { address: window(0), size: 4096 })?;
    let src = HostIn::Range(range(Place::Arena, 0, 64));
    command(bridge, 3, NO_SLOT, &MemcpyHtoD { stream: StreamId(0), dst: window(0), src })
}

/// Reads until the server closes the session.
fn closed(bridge: &TcpBridge) -> Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match (&bridge.control).read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
            Err(e) => return Err(e).context("the server does not close the session"),
        }
    }
}

#[test]
fn a_bridge_that_breaks_the_link_loses_its_own_session() -> Result<()> {
    type Act = fn(&TcpBridge) -> Result<()>;
    let deeds: &[(&str, &str, Act)] = &[
        ("frame-kind", "frame of kind 99", |b| Ok(b.frame(99, &[1; 10])?)),
        ("frame-giant", "frame", |b| {
            Ok((&b.control).write_all(FrameHeader { kind: frame::COMMANDS, len: u32::MAX }.as_bytes())?)
        }),
        ("frame-stump", "no record", |b| Ok(b.frame(frame::COMMANDS, &[1; 7])?)),
        ("record-size", "a size of", |b| Ok(b.frame(frame::COMMANDS, &[0xf0; 32])?)),
        ("record-seq", "record with seq 9", |b| Ok(b.record(9, MARK, NO_SLOT, &[0; 4])?)),
        ("record-opcode", "unknown opcode 0xffff", |b| Ok(b.record(1, 0xffff, NO_SLOT, &[])?)),
        ("record-slot", "reply slot 64", |b| Ok(b.record(1, SYNCHRONIZE, 64, &[0; 4])?)),
        ("data-beyond", "command 3, piece 0", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 8, 64, &[7; 64])
        }),
        ("data-twice", "command 3, piece 0", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, 63, &[7; 63])?;
            chunk(b, 3, 0, 0, 63, &[7; 63])
        }),
        ("data-wraps", "command 3, piece 0", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, u64::MAX, 1, &[7])
        }),
        ("data-giant", "a chunk of", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, u32::MAX, &[7; 64])
        }),
        // The server may close before it has read all of this.
        ("data-eager", "eager bytes", |b| {
            begin_copy(b)?;
            let piece = vec![7; 4 << 20];
            let send = |_| chunk(b, 1_000_000, 0, 0, EAGER_FLAG | (4 << 20), &piece).is_ok();
            ensure!(
                (0..5).map(send).filter(|sent| *sent).count() >= 4,
                "the server allows fewer eager bytes"
            );
            Ok(())
        }),
        ("data-asks", "waits for grants", |b| {
            begin_copy(b)?;
            let ask = |seq: u64| DataAsk { seq, piece: 0, reserved: 0 };
            let asked = (10..70_000).take_while(|seq| b.frame(frame::DATA_ASK, ask(*seq).as_bytes()).is_ok());
            ensure!(asked.count() > 60_000, "the server allows fewer requests");
            Ok(())
        }),
        ("data-known", "a cache that there is not", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, KNOWN_FLAG | 64, &[])
        }),
        ("data-hash", "a cache that there is not", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, HASH_FLAG | 64, &[7; 32])
        }),
        ("data-compressed-to-nothing", "0 compressed bytes in place of 64", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, COMPRESSED_FLAG | 64, &0u32.to_le_bytes())
        }),
        ("data-compressed-to-more", "64 compressed bytes in place of 64", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, COMPRESSED_FLAG | 64, &64u32.to_le_bytes())
        }),
        ("data-compressed-rubbish", "do not decompress to 64", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, COMPRESSED_FLAG | 64, &[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff])
        }),
        // One byte, 200 times.
        ("data-compressed-bomb", "do not decompress to 64", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, COMPRESSED_FLAG | 64, &[6, 0, 0, 0, 0x1f, 7, 1, 0, 181, 0])
        }),
        ("data-compressed-hash", "a chunk of 64 bytes", |b| {
            begin_copy(b)?;
            chunk(b, 3, 0, 0, COMPRESSED_FLAG | HASH_FLAG | 64, &[7; 32])
        }),
        ("data-empty", "a chunk of 0 bytes", |b| chunk(b, 3, 0, 0, 0, &[])),
    ];
    attack("bridge", |rig| {
        let open = |name: &str| {
            let hello = Hello { program: text(name), ..unknown(purpose::CONTROL) };
            TcpBridge::connect(rig.port, &hello).map_err(anyhow::Error::msg)
        };
        for (name, says, act) in deeds {
            let bridge = open(name)?;
            act(&bridge).context(*name)?;
            closed(&bridge).context(*name)?;
            logged(&rig.server, &["session lost", &format!("program=\"{name}\""), says])?;
        }
        // Data for commands that never come, and for pieces that a command does not have. It is dropped with
        // the session.
        let lonely = [("data-nobody", 1_000_000, 0), ("data-piece", 3, 5)];
        for (name, seq, piece) in lonely {
            let bridge = open(name)?;
            begin_copy(&bridge)?;
            chunk(&bridge, seq, piece, 0, 64, &[7; 64])?;
            bridge.frame(frame::ALIVE, &[])?;
        }
        for (name, ..) in lonely {
            eventually(|| {
                let sessions = rig.server.status()?["sessions"].to_string();
                ensure!(!sessions.contains(name), "the session of {name} still stands");
                Ok(())
            })?;
        }
        Ok(())
    })
}
