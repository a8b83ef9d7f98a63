//! A device process: it does all work on the sessions of one virtual machine, or of one user's programs on
//! this host.
//!
//! The keeper starts it, gives it the configuration and the connections of a VMM or of clients
//! ([`link`](crate::link)), and tells it when to end. It ends by itself when its VMM disconnects, and
//! immediately when the keeper ends.

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::exit;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use host_bridge::bridge::{Security, finish_farewells};
use identity::remote::Remote;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::write;

use sandbox::Orders;

use crate::config::{Config, Source};
use crate::confinement::{self, KeeperConnects};
use crate::keeper;
use crate::link::{Control, ToDevice, ToKeeper, keeper_has_ended};
use crate::memory_file::memory_file;
use crate::registry::Registry;
use crate::role::Role;
use crate::servers::Servers;
use crate::{native, vm};

/// How long sessions have to end when the daemon shuts down. A busy machine or server may need that long, and
/// a session whose server does not hear of its end holds a GPU for its grace period.
const DRAIN: Duration = Duration::from_secs(8);
/// How long it may take to tell servers about sessions that have ended without a link, if the keeper cannot
/// wait for that.
const FAREWELLS: Duration = Duration::from_secs(3);
const _: () = assert!(DRAIN.as_millis() + FAREWELLS.as_millis() < keeper::DRAIN.as_millis());

/// The connection to the keeper.
///
/// # Safety
/// The keeper has started this process with this descriptor, and nothing else uses it. Call this only once.
pub unsafe fn inherited(descriptor: RawFd) -> Result<Control> {
    // SAFETY: guaranteed by the caller.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))
        .context("there is no connection with the keeper")?;
    Ok(Control::from(socket))
}

/// Receives the orders for this process's confinement.
pub fn receive_orders(control: &Control) -> Result<Orders> {
    match control.next_from_keeper().context("the keeper's first message")? {
        Some(ToDevice::Orders { text }) => confinement::from_file(text).context("the keeper's orders"),
        _ => bail!("the keeper's first message does not say how to confine this process"),
    }
}

/// Receives the configuration file's text as the keeper read it. The other messages follow.
pub fn receive_config(control: &Control) -> Result<Source> {
    let Some(ToDevice::Config { path, text }) =
        control.next_from_keeper().context("the keeper's second message")?
    else {
        bail!("the keeper's second message is not the configuration");
    };
    let file = std::fs::File::from(text);
    let mut text = vec![0; file.metadata().context("the configuration")?.len() as usize];
    file.read_exact_at(&mut text, 0).context("the configuration")?;
    Ok(Source { path: PathBuf::from(path), text: String::from_utf8(text).context("the configuration")? })
}

/// Makes the keeper open sessions' connections, and sign for protected ones: only the keeper has this host's
/// key and network.
fn through_keeper(control: &Arc<Control>, servers: &mut Servers) -> Result<()> {
    for (server, session) in servers.all_mut().iter_mut().enumerate() {
        if session.source().is_some() {
            let message = control.next_from_keeper().context("the keeper's first messages")?;
            let Some(ToDevice::Keys { socket }) = message else {
                bail!("the keeper does not say where this host's key signs");
            };
            let keys = Remote::new(UnixStream::from(socket), || keeper_has_ended());
            session.security = Security::Tls(Arc::new(keys));
        }
        session.connector = Some(Arc::new(KeeperConnects { control: control.clone(), server }));
    }
    Ok(())
}

/// The part of the configuration for this role.
enum Serving {
    Vm(Box<vm::Server>),
    Native(Arc<native::Server>),
}

/// Confines this process, and serves until the keeper ends it.
pub fn run(config: Config, control: Control, orders: &Orders) -> Result<()> {
    // The keeper gets them, too, and decides.
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]).thread_block().context("blocking signals")?;
    raise_descriptor_limit();
    // Even without a sandbox, because a core dump would contain a guest's data.
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("forbidding core dumps")?;
    prctl::set_dumpable(false).context("forbidding other processes of this user to look into this one")?;
    prctl::set_no_new_privs().context("giving up the right to gain privileges")?;
    // Everything from a guest or program arrives after this.
    let confined = confinement::enter(orders);
    let text = confinement::to_file(&confined).context("the report on the sandbox")?;
    control.tell_keeper(&ToKeeper::Confined { text }).context("the report on the sandbox")?;
    confined.map_err(anyhow::Error::msg).context("a device process cannot be confined")?;
    let role = match control.next_from_keeper().context("what to serve")? {
        Some(ToDevice::Serve { role }) => role,
        Some(other) => bail!("a message before it is known what to serve: {other:?}"),
        // The keeper ended without needing this process.
        None => return Ok(()),
    };
    let role = &role;

    let control = Arc::new(control);
    let registry = Arc::new(Registry::new());
    let mut serving = match role {
        Role::Vm(name) => {
            let vm = config.vms.into_iter().find(|vm| vm.name == *name);
            let mut vm = vm.with_context(|| format!("the configuration has no vm {name}"))?;
            through_keeper(&control, &mut vm.servers)?;
            Serving::Vm(Box::new(vm::Server::new(vm, registry.clone(), control.clone())))
        }
        Role::Native(_) => {
            let mut native = config.native.context("the configuration has no section [native]")?;
            through_keeper(&control, &mut native.servers)?;
            Serving::Native(native::Server::new(native, registry.clone(), control.clone()))
        }
    };
    let report = |question| {
        let text = registry.status().to_string();
        let sent = memory_file(c"status", text.as_bytes())
            .and_then(|text| control.tell_keeper(&ToKeeper::Status { question, text }));
        if let Err(e) = sent {
            tracing::warn!("{role}: reporting the status: {e}");
        }
    };
    // Without the keeper, nobody can serve its VMM or clients again. Closing the sessions would tell their
    // programs something else.
    let next = || {
        let next = control.next_from_keeper().unwrap_or_else(|e| {
            tracing::warn!("{role}: the keeper's messages: {e}");
            None
        });
        next.unwrap_or_else(|| keeper_has_ended())
    };
    let lingers = loop {
        match (next(), &mut serving) {
            (ToDevice::End { lingers }, _) => break lingers,
            (ToDevice::AskStatus { question }, _) => report(question),
            (ToDevice::Notify { event }, Serving::Vm(_)) => notify(&event),
            (ToDevice::Restore { channel, stored }, Serving::Vm(vm)) => vm.restore(channel, stored),
            (ToDevice::Vmm { listening, requests, resumed }, Serving::Vm(vm)) => {
                vm.serve(listening, requests, resumed)?;
            }
            (ToDevice::Answered { number }, Serving::Native(native)) => native.answered(number),
            (ToDevice::Restore { channel, stored }, Serving::Native(native)) => {
                native.restore(channel, stored);
            }
            (ToDevice::Client { number, who, socket, answering, again }, Serving::Native(native)) => {
                native.serve(number, who, socket, answering.into(), again);
            }
            (other, _) => bail!("a message that is not for {role}: {other:?}"),
        }
    };
    match &mut serving {
        Serving::Vm(vm) => vm.stop(),
        Serving::Native(native) => native.drain(DRAIN),
    }
    control.tell_keeper(&ToKeeper::Ended).context("that all sessions have ended")?;
    std::thread::scope(|scope| {
        let listens = std::thread::Builder::new().name("keeper".to_owned()).spawn_scoped(scope, || {
            loop {
                if let ToDevice::AskStatus { question } = next() {
                    report(question);
                }
            }
        });
        // A process that does not listen must not outlive its keeper.
        let lingers = lingers && listens.is_ok();
        finish_farewells(if lingers { Duration::MAX } else { FAREWELLS });
        report(0);
        exit(0)
    })
}

/// Notifies, unless so many notifications are pending that the eventfd is full.
fn notify(event: &OwnedFd) {
    let mut watched = [PollFd::new(event.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut watched, PollTimeout::ZERO) == Ok(1) && watched[0].revents() == Some(PollFlags::POLLOUT) {
        // If the VMM makes it full at this moment, this process waits, and the keeper ends it in time.
        let _ = write(event, &1u64.to_ne_bytes());
    }
}

/// Each session needs about ten descriptors, and a guest with many processes has many sessions. The keeper
/// also passes its limit on, and holds descriptors for each guest itself.
pub fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(1 << 20);
        if soft < wanted { setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) } else { Ok(()) }
    });
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }
}
