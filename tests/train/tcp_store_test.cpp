// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/tcp_store.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "spillway/core/error.h"
#include "support/contains.h"

namespace spillway {
namespace {

// A port that nobody listens at now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  bind(socket, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  close(socket);
  return ntohs(address.sin_port);
}

Launch place(int rank, int port) {
  Launch launch;
  launch.rank = rank;
  launch.size = launch.local_size = 2;
  launch.local_rank = rank;
  launch.master_port = port;
  return launch;
}

std::vector<std::byte> bytes(const char* text) {
  std::vector<std::byte> all;
  for (; *text != 0; ++text) all.push_back(static_cast<std::byte>(*text));
  return all;
}

TEST(TcpStore, WhatOneRankSetsTheOtherFinds) {
  const int port = free_port();
  std::optional<std::vector<std::byte>> before, found, empty, erased;
  std::thread other([&] {
    const auto store = make_tcp_store(place(1, port), {60});
    while (!(found = store->find("id"))) std::this_thread::yield();
    empty = store->find("nothing in it");
    store->erase("id");
    store->set("seen", {});
  });
  const auto store = make_tcp_store(place(0, port), {60});
  before = store->find("seen");
  store->set("nothing in it", {});
  store->set("id", bytes("some id"));
  other.join();
  EXPECT_FALSE(before.has_value());
  EXPECT_EQ(found, bytes("some id"));
  EXPECT_EQ(empty, bytes(""));
  EXPECT_TRUE(store->find("seen").has_value());
  EXPECT_FALSE(store->find("id").has_value());
}

TEST(TcpStore, ThatDoesNotAnswerIsNamed) {
  const int port = free_port();
  try {
    static_cast<void>(make_tcp_store(place(1, port), {0.5}));
    FAIL() << "something answered";
  } catch (const RankError& error) {
    EXPECT_TRUE(test::contains(error.what(), {"127.0.0.1:" + std::to_string(port), "does not answer rank 1"}));
  }
}

TEST(TcpStore, OnSeveralHostsNeedsAnAddress) {
  Launch launch = place(1, 29500);
  launch.master_address.clear();
  try {
    static_cast<void>(make_tcp_store(launch));
    FAIL() << "no address was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(test::contains(error.what(), {"MASTER_ADDR"}));
  }
}

}  // namespace
}  // namespace spillway
