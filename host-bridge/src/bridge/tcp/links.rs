//! The connections of a session over `tcp`: how they are opened.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use protocol::link::{Hello, purpose};

use crate::bridge::config::SessionConfig;
use crate::bridge::connect::{Daemon, Greeted, Opening, greet};
use crate::bridge::error::ConnectError;
use crate::bridge::relay::{Room, compressed_file, rooms};
use crate::bridge::resume::{Ticket, Unbegun};
use crate::bridge::saved::{About, SavedRemote, Succession};
use crate::bridge::state::ChannelMemory;
use crate::bridge::welcome::{Handshake, Turn, hello};
use crate::compression::CompressUse;
use crate::stream::Stream;

/// Data connections of a session that asks for no number, mostly.
const USUAL: u32 = 4;
/// Most data connections that a server may ask for.
pub(super) const MAX_DATA_CONNECTIONS: u32 = 32;

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(in crate::bridge) struct Links {
    pub(super) control: Stream,
    /// The data connections, and how many they are. `None`: there are none, nor will there be before the
    /// session is resumed.
    pub(super) opening: Option<Opening>,
    pub(super) lanes: usize,
    /// Under TLS, of a session's first link: the connection to the daemon. The worker's welcome then comes on
    /// the control connection.
    pub(super) daemon: Option<Daemon>,
    pub(super) ticket: Ticket,
    /// Where compressed bytes lie, for each data connection. Empty: nothing is compressed.
    pub(super) rooms: Vec<Arc<Room>>,
    /// For the first links of a session that has not begun.
    pub(super) unbegun: Option<Unbegun>,
    /// For a session that was saved: where another process continues.
    pub(super) succession: Option<Succession>,
}

/// A server that has welcomed a session, which has its first connection only.
///
/// The server knows by the others that somebody has the session's secret, and keeps it for long from then on
/// if connections are lost. So they are opened once the session is saved: whatever this process comes to,
/// another one can go on with the session or end it.
#[derive(Debug)]
pub(in crate::bridge) struct Greeting {
    greeted: Greeted,
    /// What the connections begin with: the control connection under TLS, and data connections.
    control: Hello,
    data: Vec<Hello>,
    ticket: Ticket,
    /// For compressed bytes, in a session that has some.
    compressed: Option<(OwnedFd, Vec<Arc<Room>>)>,
    /// Whatever fails from here on: the server has the session already.
    unbegun: Unbegun,
    succession: Option<Succession>,
}

impl Greeting {
    /// Has another process be able to go on with the session, or at least to end it.
    pub(in crate::bridge) fn save(&mut self, about: About) -> io::Result<SavedRemote> {
        let mut saved = SavedRemote::new(&self.ticket, self.data.len(), about);
        if self.ticket.survives() {
            let compressed = self.compressed.as_ref().map(|(file, _)| file.try_clone()).transpose()?;
            self.succession = Some(saved.remember(compressed)?);
        }
        Ok(saved)
    }

    /// Opens the session's other connections. Waits for the control connection only, on which commands may go
    /// before it is welcome and before there is a data connection.
    pub(in crate::bridge) fn open(self, config: &SessionConfig) -> Result<Links, ConnectError> {
        let Greeting { mut greeted, control, data, ticket, compressed, unbegun, succession } = self;
        let lanes = data.len();
        // To lose a connection together with what was sent on it is to lose the link.
        let opening = Some(Opening::begin(config, &mut greeted, data, !ticket.survives())?);
        let (control, daemon) = greeted.begin_control(config, control)?;
        let rooms = compressed.map(|(_, rooms)| rooms).unwrap_or_default();
        let unbegun = Some(unbegun);
        Ok(Links { control, opening, lanes, daemon, ticket, rooms, unbegun, succession })
    }
}

/// Has the server welcome a session.
pub(in crate::bridge) fn greet_server(
    config: &SessionConfig,
    channel: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Greeting, Handshake), ConnectError> {
    let control = hello(config, channel, purpose::CONTROL, config.data_connections);
    let (greeted, handshake) = greet(config, &control, data_wanted(config), turn)?;
    let ticket = Ticket::new(control, &greeted, &handshake, config);
    let unbegun = Unbegun::new(&ticket, config);
    let count = handshake.data_connections;
    if count == 0 || count > MAX_DATA_CONNECTIONS {
        return Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: format!(
                "it asks for {count} data connections, where 1 to {MAX_DATA_CONNECTIONS} make sense"
            ),
        });
    }
    let data = (0..count).map(|index| Hello { index, ..hello(config, channel, purpose::DATA, 0) }).collect();
    let compressed = match ticket.compress {
        CompressUse::Never => None,
        _ => match compressed_memory(count as usize) {
            Ok(compressed) => Some(compressed),
            Err(e) => {
                tracing::warn!(server = %config.server, "data of a session is not compressed: {e}");
                None
            }
        },
    };
    Ok((Greeting { greeted, control, data, ticket, compressed, unbegun, succession: None }, handshake))
}

/// How many data connections the session will have, as far as is known before the server has said it.
fn data_wanted(config: &SessionConfig) -> u32 {
    if config.data_connections == 0 { USUAL } else { config.data_connections.min(MAX_DATA_CONNECTIONS) }
}

/// A file for the compressed bytes of `count` data connections, and their rooms.
fn compressed_memory(count: usize) -> io::Result<(OwnedFd, Vec<Arc<Room>>)> {
    let file = compressed_file(count)?;
    let rooms = rooms(&file, count)?;
    Ok((file, rooms))
}
