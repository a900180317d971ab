//! Serves the page of a live run on loopback, read-only.
//!
//! The URL contains a secret token. A request with another token, another `Host`, another origin or another method than
//! GET gets an error and no data. A stream of server-sent events carries every line of the log in order; a browser that
//! lost its connection names the line at which it continues.

use crate::Page;
use crate::http::{self, Answer, Content, Site};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Request, StatusCode};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How often an idle browser gets a comment, so that the server notices that it is gone.
const COMMENT_INTERVAL: Duration = Duration::from_secs(10);
/// The most lines of one message.
const MAX_LINES_PER_MESSAGE: usize = 2000;
/// The most bytes that the feed keeps for browsers that connect later. A longer log ends there.
const MAX_FEED_BYTES: usize = 1 << 30;

/// The lines of a log so far.
#[derive(Clone, Default)]
pub struct EventFeed(Arc<Feed>);

#[derive(Default)]
struct Feed {
    log: Mutex<Log>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Log {
    lines: Vec<Box<str>>,
    bytes: usize,
    ended: bool,
}

/// A message of server-sent events with lines of the log.
struct Batch {
    message: String,
    lines: usize,
    is_last: bool,
}

impl EventFeed {
    /// Adds a line without its line feed. Returns whether the feed accepts more.
    pub fn push(&self, line: &str) -> bool {
        let mut log = self.lock();
        log.bytes += line.len();
        // A carriage return would end a line of the event stream. In JSON it can only be white space.
        log.lines.push(line.replace('\r', " ").into());
        self.0.changed.send_replace(());
        log.bytes < MAX_FEED_BYTES
    }

    /// Ends the log.
    pub fn end(&self) {
        self.lock().ended = true;
        self.0.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.0.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn batch_from(&self, first: usize) -> Batch {
        let log = self.lock();
        let lines = log.lines.get(first..).unwrap_or_default();
        let lines = &lines[..lines.len().min(MAX_LINES_PER_MESSAGE)];
        let is_last = log.ended && first.saturating_add(lines.len()) >= log.lines.len();
        let mut message: String = lines.iter().flat_map(|line| ["data: ", line, "\n"]).collect();
        if !lines.is_empty() {
            message.push('\n');
        }
        if is_last {
            message.push_str("event: end\ndata: the log ended\n\n");
        }
        Batch { message, lines: lines.len(), is_last }
    }

    /// Sends the lines from `next` until the log ends, or the browser disconnects or stops reading.
    /// The next batch is built when the browser has taken the previous one.
    async fn send(self, browser: mpsc::Sender<Bytes>, mut next: usize) {
        let mut changed = self.0.changed.subscribe();
        while let Ok(permit) = browser.reserve().await {
            changed.mark_unchanged();
            let Batch { message, lines, is_last } = self.batch_from(next);
            if message.is_empty() {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = browser.closed() => return,
                    () = tokio::time::sleep(COMMENT_INTERVAL) => permit.send(":\n\n".into()),
                }
                continue;
            }
            permit.send(message.into());
            if is_last {
                return;
            }
            next += lines;
        }
    }
}

/// A server for one feed.
pub struct LiveServer {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    hosts: [String; 2],
    token: String,
    page: Bytes,
    feed: EventFeed,
}

impl LiveServer {
    /// Binds this port of 127.0.0.1, or a free one if it is 0. `token` is the secret of the URL.
    pub fn bind(port: u16, token: &str, name: &str, feed: EventFeed) -> io::Result<LiveServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        let mut page = Vec::new();
        Page::live(name).write(&mut page)?;
        let shared = Shared {
            hosts: [address.to_string(), format!("localhost:{}", address.port())],
            token: token.into(),
            page: page.into(),
            feed,
        };
        Ok(LiveServer { listener, address, shared: Arc::new(shared) })
    }

    /// The URL of the page.
    pub fn url(&self) -> String {
        format!("http://{}/{}/", self.address, self.shared.token)
    }

    /// Serves until the process ends.
    pub fn serve(&self) -> io::Result<()> {
        http::serve(&self.listener, self.shared.clone())
    }
}

impl Site for Shared {
    const NOT_FOUND: &'static str = "Open the link that softhca explore printed.\n";

    /// Only a request with the token, and not from another site.
    fn is_authorized(&self, request: &Request<Incoming>, _: SocketAddr) -> bool {
        let token = request.uri().path().split('/').nth(1).unwrap_or_default();
        constant_time_eq(token, &self.token) && is_same_site(self, request.headers())
    }

    fn respond(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path().splitn(3, '/').nth(2) {
            Some("") => Answer {
                status: StatusCode::OK,
                content_type: "text/html; charset=utf-8",
                content: Content::Whole(self.page.clone()),
            },
            Some("events") => self.events(request.uri().query()),
            _ => Answer::text(StatusCode::NOT_FOUND, Self::NOT_FOUND),
        }
    }
}

impl Shared {
    /// The stream of events. `from=N` names the first line that the browser does not have.
    fn events(&self, query: Option<&str>) -> Answer {
        let first = match query.map(|query| query.strip_prefix("from=").map(str::parse)) {
            None => 0,
            Some(Some(Ok(first))) => first,
            Some(_) => return Answer::text(StatusCode::BAD_REQUEST, "The query is from=LINE.\n"),
        };
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(self.feed.clone().send(sender, first));
        Answer {
            status: StatusCode::OK,
            content_type: "text/event-stream",
            content: Content::Stream(receiver),
        }
    }
}

fn is_same_site(shared: &Shared, headers: &HeaderMap) -> bool {
    let value = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let is_own = |host: &str| shared.hosts.iter().any(|own| own == host);
    value(header::HOST).is_some_and(is_own)
        && value(header::ORIGIN).is_none_or(|origin| origin.strip_prefix("http://").is_some_and(is_own))
        && value(HeaderName::from_static("sec-fetch-site"))
            .is_none_or(|site| matches!(site, "same-origin" | "none"))
}

/// Compares in a time that does not depend on the position of the first difference.
fn constant_time_eq(one: &str, other: &str) -> bool {
    one.len() == other.len()
        && one.bytes().zip(other.bytes()).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpStream};

    fn start(feed: &EventFeed) -> Arc<LiveServer> {
        let server = Arc::new(LiveServer::bind(0, "secret", "a run", feed.clone()).expect("a port"));
        let serving = server.clone();
        std::thread::spawn(move || serving.serve());
        server
    }

    fn connect(server: &LiveServer, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.write_all(request.as_bytes()).expect("a request");
        stream
    }

    fn response(mut stream: TcpStream) -> Vec<u8> {
        let mut response = Vec::new();
        // A server that rejects a request may reset the connection before it has read all of it.
        let _ = stream.read_to_end(&mut response);
        response
    }

    fn events(server: &LiveServer, target: &str) -> String {
        let address = server.address;
        format!("GET {target} HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\n\r\n")
    }

    fn status(response: &[u8]) -> String {
        String::from_utf8_lossy(response).lines().next().unwrap_or_default().into()
    }

    fn contains(response: &[u8], text: &[u8]) -> bool {
        response.windows(text.len()).any(|part| part == text)
    }

    /// Reads the head of a response.
    fn read_head(stream: &mut TcpStream) -> Vec<u8> {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
            head.push(byte[0]);
        }
        head
    }

    #[test]
    fn only_requests_with_the_token_from_the_same_site_get_data() {
        let feed = EventFeed::default();
        feed.push("first");
        feed.push("second");
        feed.end();
        let server = start(&feed);
        let host = format!("Host: {}\r\n", server.address);
        for (line, headers, expected) in [
            ("GET /secret/", host.clone(), "200"),
            ("GET /wrong/", host.clone(), "404"),
            ("GET /", host.clone(), "404"),
            ("GET /secret", host.clone(), "404"),
            ("GET /secret/other", host.clone(), "404"),
            ("POST /secret/", host.clone(), "405"),
            ("HEAD /secret/", host.clone(), "405"),
            ("GET /secret/", String::new(), "404"),
            ("GET /secret/", "Host: attacker.example\r\n".into(), "404"),
            ("GET /secret/", format!("{host}Sec-Fetch-Site: cross-site\r\n"), "404"),
            ("GET /secret/", format!("{host}Origin: null\r\n"), "404"),
            ("GET /secret/events", format!("{host}Origin: http://attacker.example\r\n"), "404"),
        ] {
            let response = response(connect(&server, &format!("{line} HTTP/1.1\r\n{headers}\r\n")));
            assert!(status(&response).contains(expected), "{line} {headers}: {}", status(&response));
            assert!(contains(&response, b"x-frame-options: DENY"), "{line} {headers}");
            assert_eq!(contains(&response, b"<html"), expected == "200", "{line} {headers}");
        }
        let foreign = events(&server, "/secret/events").replace("Origin: http://", "Origin: http://x.");
        for (request, expected) in [
            (events(&server, "/wrong/events"), "404"),
            (foreign, "404"),
            (events(&server, "/secret/events?from=x"), "400"),
            (events(&server, "/secret/events"), "200"),
        ] {
            let response = response(connect(&server, &request));
            assert!(status(&response).contains(expected), "{request}: {}", status(&response));
        }
        let all = response(connect(&server, &events(&server, "/secret/events")));
        assert!(contains(&all, b"data: first\ndata: second\n\nevent: end\n"), "{all:?}");
        let rest = response(connect(&server, &events(&server, "/secret/events?from=1")));
        assert!(contains(&rest, b"data: second\n") && !contains(&rest, b"first"), "{rest:?}");
        let beyond = format!("/secret/events?from={}", usize::MAX);
        let nothing = response(connect(&server, &events(&server, &beyond)));
        assert!(contains(&nothing, b"event: end") && !contains(&nothing, b"second"), "{nothing:?}");
    }

    #[test]
    fn a_request_that_is_too_long_gets_no_data() {
        let server = start(&EventFeed::default());
        let filler = "x".repeat(64 << 10);
        let request = format!("GET /secret/ HTTP/1.1\r\nHost: {}\r\nX: {filler}\r\n\r\n", server.address);
        let response = response(connect(&server, &request));
        assert!(!contains(&response, b"<html"), "{}", status(&response));
    }

    #[test]
    fn connections_without_a_request_do_not_lock_out_the_owner() {
        let server = start(&EventFeed::default());
        // As another user can: some send nothing, some a part of a request.
        let slow: Vec<_> = (0..64)
            .map(|index| connect(&server, if index % 2 == 0 { "" } else { "GET /secret/ HT" }))
            .collect();
        let request = format!("GET /secret/ HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
        let response = response(connect(&server, &request));
        assert!(status(&response).contains("200"), "{}", status(&response));
        drop(slow);
    }

    #[test]
    fn connections_above_the_limit_are_rejected_and_a_closed_one_makes_room() {
        let feed = EventFeed::default();
        let server = start(&feed);
        let request = events(&server, "/secret/events");
        let mut open = Vec::new();
        for _ in 0..32 {
            let mut stream = connect(&server, &request);
            assert!(status(&read_head(&mut stream)).contains("200"));
            open.push(stream);
        }
        assert!(status(&response(connect(&server, &request))).contains("503"), "there is no room");
        open.pop().expect("a connection").shutdown(Shutdown::Both).expect("it is open");
        // The server notices the end of a connection in its own time.
        while !status(&read_head(&mut connect(&server, &request))).contains("200") {
            std::thread::yield_now();
        }
        drop(open);
    }

    #[test]
    fn a_browser_that_does_not_read_holds_up_neither_the_log_nor_others() {
        let feed = EventFeed::default();
        let server = start(&feed);
        let mut slow = connect(&server, &events(&server, "/secret/events"));
        assert!(status(&read_head(&mut slow)).contains("200"));
        let line = "x".repeat(1000);
        // More than all socket buffers hold.
        for _ in 0..20 * MAX_LINES_PER_MESSAGE {
            assert!(feed.push(&line));
        }
        feed.end();
        let all = response(connect(&server, &events(&server, "/secret/events")));
        assert!(
            all.len() > 20 * MAX_LINES_PER_MESSAGE * 1000 && contains(&all[all.len() - 64..], b"event: end")
        );
        drop(slow);
    }
}
