/* The two programs of an exercise exchange bytes over TCP: RDMA does not define how programs find each other. */
#pragma once
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Ends the program with a message. */
static inline void die(const char *what)
{
    perror(what);
    exit(1);
}

/* Waits for the other program on a TCP port, as the server. */
static inline int exchange_listen(int port)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4))
        die("listen");
    int connection = accept(listener, NULL, NULL);
    if (connection < 0)
        die("accept");
    close(listener);
    return connection;
}

/* Connects to the server, as the client. */
static inline int exchange_dial(int port)
{
    int connection = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address))
        die("connect");
    return connection;
}

/* Sends bytes to the other program and receives as many from it. */
static inline void exchange(int connection, const void *mine, void *theirs, size_t bytes)
{
    if (write(connection, mine, bytes) != (ssize_t)bytes)
        die("exchange: write");
    for (size_t got = 0; got < bytes;) {
        ssize_t n = read(connection, (char *)theirs + got, bytes - got);
        if (n <= 0)
            die("exchange: the other program has ended");
        got += n;
    }
}

/* Returns when both programs have called it. */
static inline void barrier(int connection)
{
    char byte = 0;
    exchange(connection, &byte, &byte, 1);
}
