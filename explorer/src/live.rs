//! Serves the page of a run that goes on: one user, one link, read-only.
//!
//! Plain HTTP on a loopback address. The link has a secret in its path; without it, from another origin, by another
//! name for this machine or with another method than GET nothing is told. Events are server-sent events: every line of the log in turn,
//! numbered, so that a browser that lost the connection goes on where it was.

use crate::Page;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How much of a request is read.
const MAX_REQUEST_BYTES: u64 = 16 << 10;
/// How long a request may take to come, and how often an idle browser is told that all is well.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines in one message.
const MAX_LINES_PER_MESSAGE: usize = 2000;
/// Browsers at once.
const MAX_CONNECTIONS: usize = 32;
/// What is kept for browsers that come later, in bytes. A longer log ends there.
const MAX_FEED_BYTES: usize = 1 << 30;

/// The lines of a log so far.
#[derive(Clone, Default)]
pub struct EventFeed(Arc<(Mutex<Lines>, Condvar)>);

#[derive(Default)]
struct Lines {
    lines: Vec<Box<str>>,
    bytes: usize,
    ended: bool,
}

impl EventFeed {
    /// Adds a line, without its end. Returns whether there is room for more.
    pub fn push(&self, line: &str) -> bool {
        let mut lines = self.lock();
        lines.bytes += line.len();
        lines.lines.push(line.into());
        self.0.1.notify_all();
        lines.bytes < MAX_FEED_BYTES
    }

    /// Says that nothing more will come.
    pub fn end(&self) {
        self.lock().ended = true;
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.0.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The lines from `first` on, as soon as there are some; none after a while, or at the end.
    fn wait_for_lines(&self, first: usize) -> (Vec<Box<str>>, bool) {
        let lines = self.lock();
        let is_idle = |lines: &mut Lines| lines.lines.len() <= first && !lines.ended;
        let (lines, _) = self
            .0
            .1
            .wait_timeout_while(lines, IDLE_TIMEOUT, is_idle)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let new = lines.lines.get(first..).unwrap_or_default();
        let new: Vec<_> = new.iter().take(MAX_LINES_PER_MESSAGE).cloned().collect();
        let is_over = lines.ended && first + new.len() >= lines.lines.len();
        (new, is_over)
    }
}

/// A server for one feed.
pub struct LiveServer {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    page: Arc<[u8]>,
    feed: EventFeed,
}

impl LiveServer {
    /// Binds a free port of 127.0.0.1, or this one. `token` is the secret of the link.
    pub fn bind(port: u16, token: &str, name: &str, feed: EventFeed) -> io::Result<LiveServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        let mut page = Vec::new();
        Page::live(name).write(&mut page)?;
        Ok(LiveServer { listener, address, token: token.into(), page: page.into(), feed })
    }

    /// The link to open.
    pub fn url(&self) -> String {
        format!("http://{}/{}/", self.address, self.token)
    }

    /// Serves until the process ends. Each browser has a thread; there are few.
    pub fn serve(&self) -> io::Result<()> {
        let connections = Arc::new(());
        for stream in self.listener.incoming() {
            let Ok(stream) = stream else { continue };
            if Arc::strong_count(&connections) > MAX_CONNECTIONS {
                continue;
            }
            let (guest, connection) = (self.guest(), connections.clone());
            std::thread::spawn(move || {
                // A browser that goes away is no trouble of ours.
                let _ = guest.answer(stream);
                drop(connection);
            });
        }
        Ok(())
    }

    fn guest(&self) -> Guest {
        Guest {
            hosts: [self.address.to_string(), format!("localhost:{}", self.address.port())],
            token: self.token.clone(),
            page: self.page.clone(),
            feed: self.feed.clone(),
        }
    }
}

/// What one connection needs.
struct Guest {
    hosts: [String; 2],
    token: String,
    page: Arc<[u8]>,
    feed: EventFeed,
}

/// The parts of a request that matter.
#[derive(Default)]
struct Request {
    method: String,
    path: String,
    host: String,
    last_event: usize,
    is_foreign: bool,
}

impl Guest {
    fn answer(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
        stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
        let request = read_request(&stream)?;
        let path = request.path.strip_prefix('/').unwrap_or_default();
        let Some((token, place)) = path.split_once('/') else { return refuse(&stream, "404 Not Found") };
        if !constant_time_eq(token, &self.token) || !self.hosts.contains(&request.host) || request.is_foreign
        {
            return refuse(&stream, "404 Not Found");
        }
        match (request.method.as_str(), place) {
            ("GET", "") => {
                respond(&stream, "200 OK", "text/html; charset=utf-8", Some(self.page.len()))?;
                (&stream).write_all(&self.page)
            }
            ("GET", "events") => self.events(&stream, request.last_event),
            ("GET", _) => refuse(&stream, "404 Not Found"),
            _ => refuse(&stream, "405 Method Not Allowed"),
        }
    }

    fn events(&self, mut stream: &TcpStream, first: usize) -> io::Result<()> {
        respond(stream, "200 OK", "text/event-stream", None)?;
        let mut next = first;
        loop {
            let (lines, is_over) = self.feed.wait_for_lines(next);
            next += lines.len();
            let mut message = String::new();
            for line in &lines {
                message.push_str("data: ");
                message.push_str(line);
                message.push('\n');
            }
            match lines.is_empty() {
                false => message.push_str(&format!("id: {next}\n\n")),
                true => message.push_str(": still there\n\n"),
            }
            if is_over {
                message.push_str("event: end\ndata:\n\n");
            }
            stream.write_all(message.as_bytes())?;
            if is_over {
                return Ok(());
            }
        }
    }
}

/// Compares without telling by its time how much is right.
fn constant_time_eq(one: &str, other: &str) -> bool {
    one.len() == other.len()
        && one.bytes().zip(other.bytes()).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
}

fn read_request(stream: &TcpStream) -> io::Result<Request> {
    let mut lines = BufReader::new(stream.take(MAX_REQUEST_BYTES)).lines();
    let first = lines.next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))?;
    let mut words = first.split(' ');
    let mut request = Request {
        method: words.next().unwrap_or_default().into(),
        path: words.next().unwrap_or_default().into(),
        ..Request::default()
    };
    for line in lines {
        let line = line?;
        if line.is_empty() {
            return Ok(request);
        }
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => request.host = value.into(),
            "last-event-id" => request.last_event = value.parse().unwrap_or(0),
            // A page of somebody else asks.
            "sec-fetch-site" => request.is_foreign = !matches!(value, "same-origin" | "none"),
            _ => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

fn respond(mut stream: &TcpStream, status: &str, kind: &str, length: Option<usize>) -> io::Result<()> {
    let length = length.map_or(String::new(), |length| format!("Content-Length: {length}\r\n"));
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n\
         X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nConnection: close\r\n\r\n"
    )
}

fn refuse(mut stream: &TcpStream, status: &str) -> io::Result<()> {
    let text = "Open the link that softhca explore printed.\n";
    respond(stream, status, "text/plain; charset=utf-8", Some(text.len()))?;
    stream.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(server: &LiveServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn only_whoever_knows_the_link_is_told_anything() {
        let feed = EventFeed::default();
        feed.push("first");
        feed.push("second");
        feed.end();
        let server = Arc::new(LiveServer::bind(0, "secret", "a run", feed).expect("a port"));
        let serving = server.clone();
        std::thread::spawn(move || serving.serve());
        let host = format!("Host: {}\r\n", server.address);
        let status = |request: String| ask(&server, &request).lines().next().unwrap_or_default().to_owned();
        for (line, headers, wanted) in [
            ("GET /secret/ HTTP/1.1", host.as_str(), "200"),
            ("GET /wrong/ HTTP/1.1", &host, "404"),
            ("GET / HTTP/1.1", &host, "404"),
            ("GET /secret/other HTTP/1.1", &host, "404"),
            ("POST /secret/ HTTP/1.1", &host, "405"),
            ("GET /secret/ HTTP/1.1", "Host: attacker.example\r\n", "404"),
            ("GET /secret/events HTTP/1.1", &format!("{host}Sec-Fetch-Site: cross-site\r\n"), "404"),
        ] {
            let answer = status(format!("{line}\r\n{headers}\r\n"));
            assert!(answer.contains(wanted), "{line} {headers}: {answer}");
        }
        let events = ask(&server, &format!("GET /secret/events HTTP/1.1\r\n{host}\r\n"));
        assert!(events.ends_with("data: first\ndata: second\nid: 2\n\nevent: end\ndata:\n\n"), "{events}");
        let later = ask(&server, &format!("GET /secret/events HTTP/1.1\r\n{host}Last-Event-ID: 1\r\n\r\n"));
        assert!(later.contains("\r\n\r\ndata: second\nid: 2\n\n"), "{later}");
    }
}
