// A program with another process of itself, which runs it anew with the argument "other" and the number of its end of a socket; descriptors go over that with a few bytes.
#pragma once

#include "common.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

struct OtherProcess {
    pid_t pid;
    int socket;
};

inline OtherProcess start_other(char **argv) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
    pid_t child = fork();
    REQUIRE(child >= 0, "no process");
    if (child == 0) {
        close(ends[0]);
        execl("/proc/self/exe", argv[0], "other", std::to_string(ends[1]).c_str(), (char *)nullptr);
        _exit(127);
    }
    close(ends[1]);
    return {child, ends[0]};
}

inline void send_fd(int socket, int fd, const void *data, size_t size) {
    char space[CMSG_SPACE(sizeof fd)] = {};
    iovec part = {(void *)data, size};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    REQUIRE(sendmsg(socket, &message, 0) == (ssize_t)size, "the descriptor cannot be sent");
}

inline int receive_fd(int socket, void *data, size_t size) {
    int fd;
    char space[CMSG_SPACE(sizeof fd)] = {};
    iovec part = {data, size};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    REQUIRE(recvmsg(socket, &message, 0) == (ssize_t)size, "the other process is gone");
    cmsghdr *head = CMSG_FIRSTHDR(&message);
    REQUIRE(head && head->cmsg_type == SCM_RIGHTS, "no descriptor came");
    memcpy(&fd, CMSG_DATA(head), sizeof fd);
    return fd;
}
