// Calls of rsockets: connections that do not block, rpoll and rselect beside a pipe, half close, two threads on one
// socket, many connections, errors. With the argument `http`, a server on plain sockets for the preload library.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define REQUIRE(condition)                                                        \
	do {                                                                          \
		if (!(condition)) {                                                       \
			printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno);      \
			exit(1);                                                              \
		}                                                                         \
	} while (0)

enum { CONNECTIONS = 40, STREAM = 8 << 20 };

static struct sockaddr_in address;

static unsigned char byte_at(size_t index) { return index * 7 + index / 251; }

static int listener(void)
{
	int socket = rsocket(AF_INET, SOCK_STREAM, 0), one = 1;
	REQUIRE(socket >= 0);
	REQUIRE(!rsetsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
	REQUIRE(!rbind(socket, (struct sockaddr *)&address, sizeof address));
	REQUIRE(!rlisten(socket, CONNECTIONS));
	return socket;
}

static int ready(int socket, int events, int timeout)
{
	struct pollfd entry = {.fd = socket, .events = events};
	int found = rpoll(&entry, 1, timeout);
	REQUIRE(found >= 0);
	return found ? entry.revents : 0;
}

// Connects a client while `busy`, if it is a socket, is ready to be read.
static void pair(int server, int busy, int *client, int *accepted)
{
	socklen_t length = sizeof(int);
	int error = 1;
	*client = rsocket(AF_INET, SOCK_STREAM, 0);
	REQUIRE(*client >= 0);
	REQUIRE(!rfcntl(*client, F_SETFL, O_NONBLOCK));
	REQUIRE(rfcntl(*client, F_GETFL) & O_NONBLOCK);
	REQUIRE(rconnect(*client, (struct sockaddr *)&address, sizeof address) == -1 && errno == EINPROGRESS);
	// The request is sent as its events are processed: both sides are polled.
	struct pollfd all[] = {
		{.fd = server, .events = POLLIN}, {.fd = *client, .events = POLLOUT}, {.fd = busy, .events = POLLIN}};
	do
		REQUIRE(rpoll(all, busy < 0 ? 2 : 3, -1) > 0 && (busy < 0 || all[2].revents));
	while (!(all[0].revents & POLLIN));
	struct sockaddr_in peer, own;
	socklen_t size = sizeof peer;
	*accepted = raccept(server, (struct sockaddr *)&peer, &size);
	REQUIRE(*accepted >= 0);
	REQUIRE(ready(*client, POLLOUT, -1) == POLLOUT);
	REQUIRE(!rgetsockopt(*client, SOL_SOCKET, SO_ERROR, &error, &length) && error == 0);
	REQUIRE(!rgetsockname(*client, (struct sockaddr *)&own, &size));
	REQUIRE(own.sin_port == peer.sin_port);
	REQUIRE(!rgetpeername(*client, (struct sockaddr *)&own, &size) && own.sin_port == address.sin_port);
	REQUIRE(!rfcntl(*client, F_SETFL, 0));
}

static void *send_stream(void *socket)
{
	unsigned char *data = malloc(STREAM);
	for (size_t index = 0; index < STREAM; index++)
		data[index] = byte_at(index);
	REQUIRE(rsend(*(int *)socket, data, STREAM, 0) == STREAM);
	REQUIRE(!rshutdown(*(int *)socket, SHUT_WR));
	REQUIRE(rsend(*(int *)socket, data, 1, 0) == -1 && errno == EPIPE);
	free(data);
	return NULL;
}

static void receive_stream(int socket)
{
	unsigned char data[5000];
	size_t total = 0;
	for (;;) {
		size_t half = 1 + total % 2000;
		struct iovec parts[] = {{data, half}, {data + half, sizeof data - half}};
		ssize_t length = rreadv(socket, parts, 2);
		REQUIRE(length >= 0);
		if (length == 0)
			break;
		for (ssize_t index = 0; index < length; index++)
			REQUIRE(data[index] == byte_at(total + index));
		total += length;
	}
	REQUIRE(total == STREAM);
}

static void *run_receiver(void *socket)
{
	receive_stream(*(int *)socket);
	return NULL;
}

// Each side sends and receives at once, in two threads, and closes its direction.
static void full_duplex(int a, int b)
{
	pthread_t senders[2];
	int sockets[] = {a, b};
	for (int side = 0; side < 2; side++)
		REQUIRE(!pthread_create(&senders[side], NULL, send_stream, &sockets[side]));
	pthread_t receiver;
	REQUIRE(!pthread_create(&receiver, NULL, run_receiver, &sockets[1]));
	receive_stream(a);
	pthread_join(receiver, NULL);
	for (int side = 0; side < 2; side++)
		pthread_join(senders[side], NULL);
}

static void messages(int client, int accepted)
{
	char text[16] = "";
	int ends[2];
	REQUIRE(!pipe(ends));
	struct pollfd entries[] = {{.fd = ends[0], .events = POLLIN}, {.fd = accepted, .events = POLLIN}};
	REQUIRE(rpoll(entries, 2, 0) == 0);
	REQUIRE(write(ends[1], "x", 1) == 1);
	REQUIRE(rpoll(entries, 2, -1) == 1 && entries[0].revents == POLLIN && !entries[1].revents);
	REQUIRE(rrecv(accepted, text, 4, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	REQUIRE(rwrite(client, "hello", 5) == 5);
	do
		REQUIRE(rpoll(entries, 2, -1) > 0);
	while (!(entries[1].revents & POLLIN));
	REQUIRE(entries[0].revents == POLLIN);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(accepted, &set);
	FD_SET(ends[0], &set);
	int most = accepted > ends[0] ? accepted : ends[0];
	REQUIRE(rselect(most + 1, &set, NULL, NULL, NULL) == 2 && FD_ISSET(accepted, &set));
	REQUIRE(rrecv(accepted, text, sizeof text, MSG_PEEK) == 5);
	char rest[8] = "";
	struct iovec parts[] = {{text, 2}, {rest, 7}};
	struct msghdr peeked = {.msg_iov = parts, .msg_iovlen = 2};
	REQUIRE(rrecvmsg(accepted, &peeked, MSG_PEEK) == 5 && !memcmp(text, "he", 2) && !strcmp(rest, "llo"));
	REQUIRE(rread(accepted, text, 2) == 2 && rread(accepted, text + 2, 14) == 3);
	REQUIRE(!strcmp(text, "hello"));
	struct iovec part = {"ab", 2};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	REQUIRE(rsendmsg(accepted, &message, 0) == 2 && rsendto(accepted, "cd", 2, 0, NULL, 0) == 2);
	REQUIRE(rrecv(client, text, 4, MSG_WAITALL) == 4 && !memcmp(text, "abcd", 4));
	close(ends[0]);
	close(ends[1]);
}

// A sender that does not block stops when the buffers are full, and continues when they are read.
static void backpressure(int client, int accepted)
{
	static char block[4096];
	size_t sent = 0, received = 0;
	REQUIRE(!rfcntl(client, F_SETFL, O_NONBLOCK));
	for (;;) {
		ssize_t length = rsend(client, block, sizeof block, 0);
		if (length < 0)
			break;
		sent += length;
	}
	REQUIRE(errno == EAGAIN && sent > 0);
	REQUIRE(!(ready(client, POLLOUT, 0) & POLLOUT));
	while (received < sent) {
		ssize_t length = rrecv(accepted, block, sizeof block, 0);
		REQUIRE(length > 0);
		received += length;
	}
	REQUIRE(ready(client, POLLOUT, -1) & POLLOUT);
	REQUIRE(!rfcntl(client, F_SETFL, 0));
}

// A socket that stays ready does not hide the events of others.
static void starvation(int server, int client, int accepted)
{
	char byte;
	int others[2];
	REQUIRE(rwrite(client, "x", 1) == 1 && ready(accepted, POLLIN, -1) == POLLIN);
	pair(server, accepted, &others[0], &others[1]);
	REQUIRE(rread(accepted, &byte, 1) == 1 && byte == 'x');
	REQUIRE(!rclose(others[0]) && !rclose(others[1]));
}

static void errors(void)
{
	char byte;
	int number;
	socklen_t length = sizeof number;
	REQUIRE(rsocket(AF_INET, SOCK_DGRAM, 0) == -1 && errno == EPROTONOSUPPORT);
	REQUIRE(rsocket(AF_UNIX, SOCK_STREAM, 0) == -1 && errno == EAFNOSUPPORT);
	REQUIRE(rrecv(0, &byte, 1, 0) == -1 && errno == EBADF);
	int socket = rsocket(AF_INET, SOCK_STREAM, 0);
	REQUIRE(rrecv(socket, &byte, 1, 0) == -1 && errno == ENOTCONN);
	REQUIRE(rgetsockopt(socket, SOL_SOCKET, 9999, &number, &length) == -1 && errno == EOPNOTSUPP);
	REQUIRE(!rgetsockopt(socket, SOL_SOCKET, SO_RCVBUF, &number, &length) && number > 0);
	struct sockaddr_in nobody = address;
	nobody.sin_port = htons(1);
	REQUIRE(rconnect(socket, (struct sockaddr *)&nobody, sizeof nobody) == -1 && errno == ECONNREFUSED);
	REQUIRE(!rclose(socket));
	REQUIRE(rclose(socket) == -1 && errno == EBADF);
}

// The descriptor of a socket is higher than one that was opened before, whatever was closed since.
static void descriptors(void)
{
	int closed[16], open_before;
	for (int index = 0; index < 16; index++)
		REQUIRE((closed[index] = open("/dev/null", O_RDONLY)) >= 0);
	REQUIRE((open_before = open("/dev/null", O_RDONLY)) >= 0);
	for (int index = 0; index < 16; index++)
		close(closed[index]);
	int socket = rsocket(AF_INET, SOCK_STREAM, 0);
	REQUIRE(socket > open_before);
	REQUIRE(!rclose(socket));
	close(open_before);
}

static void many(int server)
{
	int clients[CONNECTIONS], accepted[CONNECTIONS];
	struct pollfd entries[CONNECTIONS];
	for (int index = 0; index < CONNECTIONS; index++) {
		pair(server, -1, &clients[index], &accepted[index]);
		entries[index] = (struct pollfd){.fd = accepted[index], .events = POLLIN};
	}
	REQUIRE(rpoll(entries, CONNECTIONS, 0) == 0);
	for (int index = 0; index < CONNECTIONS; index += 3)
		REQUIRE(rwrite(clients[index], "y", 1) == 1);
	for (int expected = (CONNECTIONS + 2) / 3; rpoll(entries, CONNECTIONS, -1) < expected;)
		;
	for (int index = 0; index < CONNECTIONS; index++) {
		REQUIRE(!(entries[index].revents & POLLIN) == !!(index % 3));
		REQUIRE(!rclose(clients[index]));
	}
	for (int index = 0; index < CONNECTIONS; index++) {
		char bytes[2];
		REQUIRE(rrecv(accepted[index], bytes, 2, MSG_WAITALL) == !(index % 3));
		REQUIRE(ready(accepted[index], POLLIN, -1) & POLLHUP);
		REQUIRE(rsend(accepted[index], bytes, 1, 0) == -1 && errno == EPIPE);
		REQUIRE(!rclose(accepted[index]));
	}
}

static int serve_http(void)
{
	enum { BODY = 3 << 20 };
	char request[4096], *body = malloc(BODY);
	int server = socket(AF_INET, SOCK_STREAM, 0);
	REQUIRE(!bind(server, (struct sockaddr *)&address, sizeof address) && !listen(server, 5));
	int peer = accept(server, NULL, NULL);
	REQUIRE(peer >= 0 && read(peer, request, sizeof request) > 0);
	memset(body, 'z', BODY);
	int length = snprintf(request, sizeof request, "HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n", BODY);
	REQUIRE(write(peer, request, length) == length && write(peer, body, BODY) == BODY);
	close(peer);
	close(server);
	return 0;
}

int main(int count, char **words)
{
	address.sin_family = AF_INET;
	address.sin_port = htons(atoi(words[1]));
	inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
	if (count > 2)
		return serve_http();
	int server = listener(), client, accepted;
	errors();
	descriptors();
	pair(server, -1, &client, &accepted);
	messages(client, accepted);
	backpressure(client, accepted);
	starvation(server, client, accepted);
	full_duplex(client, accepted);
	REQUIRE(!rclose(client) && !rclose(accepted));
	many(server);
	REQUIRE(!rclose(server));
	puts("all calls behave");
	return 0;
}
