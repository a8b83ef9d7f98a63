use std::io::{BufRead, Write};

use protocol::device::Answer;
use protocol::link::Welcome;
use zerocopy::{FromZeros, IntoBytes};

use super::*;

#[test]
fn clients_are_told_only_addresses_at_which_the_server_listens() {
    let [v4, v6] = ["192.0.2.1", "2001:db8::1"].map(|text| text.parse::<IpAddr>().unwrap());
    for (wildcard, reached) in [("0.0.0.0", [true, false]), ("::", [true; 2]), ("*", [true; 2])] {
        assert_eq!([v4, v6].map(|address| is_within(wildcard, address)), reached, "{wildcard}");
    }
}

/// A client's TLS with a greeter, up to its first message.
struct Client {
    stream: UnixStream,
    tls: rustls::ClientConnection,
    number: u64,
}

impl Client {
    fn new(greeter: &mut Greeter, identity: &identity::Identity) -> Client {
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let server = greeter.server.trust.as_ref().unwrap().fingerprint();
        let config = identity::tls::client_pinning(identity, &[server]).unwrap();
        let tls = rustls::ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
        let (number, until) = (greeter.next, Instant::now() + Duration::from_secs(3600));
        let (source, peer) = (Source::V4([10, 0, 0, 1]), "10.0.0.1:9".to_owned());
        let socket = Socket::Tcp(std::os::fd::OwnedFd::from(theirs).into());
        greeter.admit(Arrival { socket, source, peer, until, phase: Phase::First });
        let mut client = Client { stream, tls, number };
        while client.tls.is_handshaking() {
            client.turn(greeter);
        }
        client
    }

    /// Sends what there is, has the greeter take it, and takes what it has answered.
    fn turn(&mut self, greeter: &mut Greeter) {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream).unwrap();
        }
        greeter.advance(self.number);
        self.take();
    }

    fn say(&mut self, greeter: &mut Greeter, purpose: u32, secret: identity::Secret) {
        let hello = Hello {
            magic: protocol::link::MAGIC,
            version: OURS.version(),
            fingerprint: OURS.fingerprint(),
            purpose,
            secret: secret.0,
            ..Hello::new_zeroed()
        };
        self.tls.writer().write_all(hello.as_bytes()).unwrap();
        self.turn(greeter);
    }

    /// Takes what has come, without waiting.
    fn take(&mut self) {
        while self.tls.read_tls(&mut self.stream).is_ok_and(|n| n > 0) {
            self.tls.process_new_packets().unwrap();
        }
    }

    /// Whether the server has said something.
    fn has_heard(&mut self) -> bool {
        self.take();
        self.tls.reader().fill_buf().is_ok_and(|said| !said.is_empty())
    }

    /// Waits for the server's welcome, and gives its status.
    fn hear(&mut self) -> u32 {
        self.stream.set_nonblocking(false).unwrap();
        self.stream.set_read_timeout(Some(test_kit::PATIENCE)).unwrap();
        let (mut welcome, mut got) = (Welcome::new_zeroed(), 0);
        while got < size_of::<Welcome>() {
            match self.tls.reader().read(&mut welcome.as_mut_bytes()[got..]) {
                Ok(n) => got += n,
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                    assert!(self.tls.read_tls(&mut self.stream).unwrap() > 0, "closed without an answer");
                    self.tls.process_new_packets().unwrap();
                }
            }
        }
        welcome.status
    }
}

#[test]
fn who_connects_does_not_wait_for_the_disk_that_writes_who_has_joined() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--listen=tcp:127.0.0.1:1", "--identity", folder.path().to_str().unwrap()];
    let server = Server::new(Serve::from_flags(&flags), &mut Inherited::default()).unwrap();
    let mut greeter = Greeter::new(Arc::new(server), Vec::new()).unwrap();
    let server = Arc::clone(&greeter.server);
    let trust = server.trust.as_ref().unwrap();
    let secret = trust.enroll("host", Duration::from_secs(3600)).unwrap();
    let identity = identity::Identity::generate().unwrap();
    let mut client = Client::new(&mut greeter, &identity);
    trust.change(|_| {
        // Until this is over, nothing else changes who the clients are.
        client.say(&mut greeter, purpose::JOIN, secret);
        let mut other = Client::new(&mut greeter, &identity);
        other.say(&mut greeter, purpose::CONTROL, identity::Secret([0; 32]));
        assert_eq!(other.hear(), Reason::UnknownClient.answer() as u32);
        // Those that wait are not ever more.
        let join = |_| {
            let mut client = Client::new(&mut greeter, &identity);
            client.say(&mut greeter, purpose::JOIN, secret);
            client
        };
        // The thread may take the first one at any time, and no other.
        let mut more: Vec<Client> = (0..MAX_JOINS + 2).map(join).collect();
        let full = Reason::ServerFull.answer() as u32;
        let is_refused = |nth: usize| more[nth].has_heard() && more[nth].hear() == full;
        assert!([MAX_JOINS, MAX_JOINS + 1].into_iter().any(is_refused));
    });
    assert_eq!(client.hear(), Answer::Ok as u32);
    assert_eq!(trust.principals().find(&identity.fingerprint()), Some("host"));
}

#[test]
fn listening_at_all_addresses_fails_if_one_is_taken() {
    let Ok(taken) = TcpListener::bind("[::1]:0") else {
        eprintln!("proves nothing: this machine has no IPv6");
        return;
    };
    let listen = format!("--listen=tcp:*:{}", taken.local_addr().unwrap().port());
    let (mut inherited, mut files) = (Inherited::default(), Files::default());
    let options = Serve::from_flags(&[&listen, "--insecure=true"]);
    let server = Arc::new(Server::new(options, &mut inherited).unwrap());
    let failed = start(&server, &mut inherited, &mut files).unwrap_err();
    assert!(failed.to_string().contains("cannot listen at tcp:*"), "{failed}");
}

#[test]
fn a_socket_for_all_addresses_reports_ipv4_clients_by_their_addresses() {
    let Ok(socket) = TcpListener::bind("[::]:0") else {
        eprintln!("proves nothing: this machine has no IPv6");
        return;
    };
    let _client = TcpStream::connect(("127.0.0.1", socket.local_addr().unwrap().port())).unwrap();
    let peer = Listener::Tcp(socket).accept().unwrap().peer;
    assert!(peer.starts_with("127.0.0.1:"), "{peer}");
}
