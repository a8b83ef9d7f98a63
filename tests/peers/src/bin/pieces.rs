//! Two processes between which pieces go as between two servers: what the benchmark compares with `perftest`,
//! without GPUs and their copies.
//!
//! ```text
//! pieces listen 127.0.0.1:9820 --device rxe0
//! pieces connect 127.0.0.1:9820 --device rxe1 --size 1048576 --count 64
//! ```
//!
//! The result is one line of `key=value`.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use host_bridge::verbs::pieces::End;
use host_bridge::verbs::{Access, Device, Domain, PieceBuffer, Pieces, Registration, Settings, Slab};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use protocol::link::{DirectHeader, DirectQueue};
use protocol::ops::direct::{MAX_PIECE, PIECES};
use zerocopy::{FromZeros, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (role, address) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let (mut settings, mut size, mut count) = (Settings::default(), MAX_PIECE, 64u64);
    while let Some(option) = args.next() {
        let value = args.next().ok_or(format!("{option} wants a value"))?;
        match option.as_str() {
            "--device" => settings.device = Some(value),
            "--size" => size = value.parse()?,
            "--count" => count = value.parse()?,
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    let domain = Domain::new(Device::open(&settings)?)?;
    match role.as_str() {
        "listen" => {
            let listener = TcpListener::bind(&address)?;
            println!("listening");
            for socket in listener.incoming() {
                match receive(socket?, &domain, &settings) {
                    Ok(()) => println!("served"),
                    Err(e) => println!("lost: {e}"),
                }
            }
            Ok(())
        }
        "connect" => send(TcpStream::connect(&address)?, &domain, &settings, [size, count]),
        _ => Err("pieces listen|connect ADDRESS [options]".into()),
    }
}

/// A buffer of this program's.
struct Own(Arc<Slab>);

// SAFETY: the slab keeps its registration and its memory, which nothing here touches.
unsafe impl PieceBuffer for Own {
    fn registration(&self) -> Option<&Registration> {
        Some(self.0.registration())
    }
}

fn buffers(domain: &Arc<Domain>, access: Access) -> Result<Vec<Own>> {
    let buffer = |_| Ok(Own(Arc::new(Slab::new(domain, MAX_PIECE as usize, access)?)));
    (0..PIECES).map(buffer).collect()
}

/// Sleeps until something happens.
fn sleep(queue: &Pieces<Own>, socket: &TcpStream) -> Result<()> {
    let mut fds =
        [PollFd::new(queue.fds()[0], PollFlags::POLLIN), PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::NONE)?;
    queue.disarm();
    Ok(())
}

fn receive(mut socket: TcpStream, domain: &Arc<Domain>, settings: &Settings) -> Result<()> {
    let (mut theirs, mut count) = (DirectQueue::new_zeroed(), [0; 8]);
    socket.read_exact(theirs.as_mut_bytes())?;
    socket.read_exact(&mut count)?;
    let mut left = u64::from_le_bytes(count);
    let mut queue = Pieces::new(domain, End::Receiving, PIECES, settings)?;
    buffers(domain, Access::Write)?.into_iter().try_for_each(|buffer| queue.receive(buffer))?;
    queue.connect(&DirectQueue { receives: 0, ..theirs })?;
    socket.set_nodelay(true)?;
    socket.write_all(queue.offer().as_bytes())?;
    socket.set_nonblocking(true)?;
    let mut done = Vec::new();
    while left > 0 {
        queue.arm()?;
        queue.poll(&mut done)?;
        if done.is_empty() {
            sleep(&queue, &socket)?;
            if matches!(socket.peek(&mut [0]), Ok(0)) {
                return Err("the peer has gone".into());
            }
            continue;
        }
        let came = done.len();
        for piece in done.drain(..) {
            left = left.saturating_sub(1);
            piece.buffer.map_or(Ok(()), |buffer| queue.receive(buffer))?;
        }
        socket.write_all(&[came as u8])?;
    }
    // The peer closes when it has seen everything.
    socket.set_nonblocking(false)?;
    while socket.read(&mut [0])? > 0 {}
    Ok(())
}

fn send(
    mut socket: TcpStream,
    domain: &Arc<Domain>,
    settings: &Settings,
    [size, count]: [u64; 2],
) -> Result<()> {
    let mut queue = Pieces::new(domain, End::Sending, PIECES, settings)?;
    let mut free = buffers(domain, Access::Read)?;
    socket.write_all(queue.offer().as_bytes())?;
    socket.write_all(&count.to_le_bytes())?;
    let mut theirs = DirectQueue::new_zeroed();
    socket.read_exact(theirs.as_mut_bytes())?;
    queue.connect(&theirs)?;
    socket.set_nonblocking(true)?;
    let (mut done, mut number, mut granted, begin) = (Vec::new(), 0, 0, Instant::now());
    // The last pieces have arrived when their receives have been posted again.
    while granted < count {
        queue.arm()?;
        queue.poll(&mut done)?;
        let mut worked = !done.is_empty();
        free.extend(done.drain(..).filter_map(|piece| piece.buffer));
        let mut bytes = [0; PIECES];
        match socket.read(&mut bytes) {
            Ok(0) => return Err("the peer has gone".into()),
            Ok(n) => {
                let more: u64 = bytes[..n].iter().copied().map(u64::from).sum();
                queue.grant(more as usize)?;
                (granted, worked) = (granted + more, true);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        while number < count
            && queue.may_send()
            && let Some(buffer) = free.pop()
        {
            number += 1;
            let header = DirectHeader { number, len: size as u32, reserved: 0 };
            let more = number < count && !free.is_empty();
            queue.send(&header, Some((buffer, size as usize)), more)?;
        }
        if !worked {
            sleep(&queue, &socket)?;
        }
    }
    let time = begin.elapsed().as_secs_f64();
    println!("ok size={size} count={count} mb_per_s={:.2}", (size * count) as f64 / time / 1e6);
    Ok(())
}
