// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "formats/format_support.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::read_file;
using test::TempFolder;
using test::write_file;
using Names = std::vector<std::string>;

TensorSource source(const std::string& name, DType dtype, std::vector<std::int64_t> shape, char byte) {
  return {name, dtype, std::move(shape),
          [byte](std::span<std::byte> out) { std::fill(out.begin(), out.end(), static_cast<std::byte>(byte)); }};
}

std::vector<TensorSource> copy_of(const SafetensorsReader& reader) {
  std::vector<TensorSource> tensors;
  for (const std::string& name : reader.names()) {
    const TensorView view = reader.tensor(name);
    tensors.push_back({name, view.dtype, view.shape, [view](std::span<std::byte> out) {
                         std::copy(view.bytes.begin(), view.bytes.end(), out.begin());
                       }});
  }
  return tensors;
}

void expect_equal(const SafetensorsReader& a, const SafetensorsReader& b) {
  ASSERT_EQ(a.names(), b.names());
  for (const std::string& name : a.names()) {
    const TensorView x = a.tensor(name);
    const TensorView y = b.tensor(name);
    EXPECT_EQ(x.dtype, y.dtype) << name;
    EXPECT_EQ(x.shape, y.shape) << name;
    EXPECT_TRUE(std::equal(x.bytes.begin(), x.bytes.end(), y.bytes.begin(), y.bytes.end())) << name;
  }
}

std::int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

TEST(SafetensorsWrite, AGoldenModelComesBackEqual) {
  const TempFolder folder;
  const SafetensorsReader original(golden("gpt2"));
  write_safetensors(folder / "copy.safetensors", copy_of(original));
  const SafetensorsReader copy(folder / "copy.safetensors");
  expect_equal(original, copy);
  EXPECT_EQ(copy.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(folder.file_names(), (Names{"copy.safetensors"}));
}

TEST(SafetensorsWrite, TheHeaderIsPaddedToEightBytes) {
  const TempFolder folder;
  for (std::size_t length = 1; length <= 9; ++length) {
    write_safetensors(folder / "t.safetensors", std::vector{source(std::string(length, 'n'), DType::f32, {2}, 1)});
    const std::string bytes = read_file(folder / "t.safetensors");
    EXPECT_EQ((bytes.size() - 8) % 8, 0u);
    EXPECT_EQ(static_cast<unsigned char>(bytes[0]) % 8, 0);
  }
}

TEST(SafetensorsWrite, MixedTypesAreAlignedAndOtherwiseKeepTheirOrder) {
  const TempFolder folder;
  const std::vector<TensorSource> tensors{source("b1", DType::u8, {3}, 1),     source("f2", DType::f32, {1}, 2),
                                          source("f1", DType::f32, {2, 1}, 3), source("l", DType::i64, {}, 4),
                                          source("h", DType::bf16, {5}, 5),    source("none", DType::f64, {0}, 6)};
  write_safetensors(folder / "t.safetensors", tensors, {});
  const SafetensorsReader reader(folder / "t.safetensors");
  EXPECT_EQ(reader.names(), (Names{"l", "none", "f2", "f1", "h", "b1"}));
  EXPECT_TRUE(reader.metadata().empty());
  for (const TensorSource& tensor : tensors) {
    const TensorView view = reader.tensor(tensor.name);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.bytes.data()) % static_cast<std::uintptr_t>(size_of(view.dtype)),
              0u);
    std::vector<std::byte> expected(view.bytes.size());
    tensor.fill(expected);
    EXPECT_TRUE(std::equal(view.bytes.begin(), view.bytes.end(), expected.begin(), expected.end())) << tensor.name;
  }
}

TEST(SafetensorsWrite, NamesAndMetadataOfAnyTextComeBack) {
  const TempFolder folder;
  const std::string odd = "quote\" slash\\ tab\t ümlaut \x01";
  write_safetensors(folder / "t.safetensors", std::vector{source(odd, DType::u8, {1}, 1)}, {{odd, odd}});
  const SafetensorsReader reader(folder / "t.safetensors");
  EXPECT_EQ(reader.names(), (Names{odd}));
  EXPECT_EQ(reader.metadata().at(odd), odd);
}

TEST(SafetensorsWrite, ShardsAreCutBySizeAndOneLargeTensorGetsItsOwn) {
  const TempFolder folder;
  const std::vector<TensorSource> tensors{source("a", DType::u8, {60}, 1), source("b", DType::u8, {40}, 2),
                                          source("c", DType::u8, {1}, 3), source("large", DType::u8, {500}, 4),
                                          source("d", DType::u8, {10}, 5)};
  write_safetensors_folder(folder.path(), tensors, Bytes{100});
  EXPECT_EQ(folder.file_names(), (Names{"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                                        "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                                        "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(read_file(folder / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 611);
  EXPECT_EQ(index["weight_map"]["a"], "model-00001-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["b"], "model-00001-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["c"], "model-00002-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["large"], "model-00003-of-00004.safetensors");
  EXPECT_EQ(SafetensorsReader(folder.path()).names(), (Names{"a", "b", "c", "large", "d"}));
}

TEST(SafetensorsWrite, ShardedGoldenModelComesBackEqual) {
  const TempFolder folder;
  const SafetensorsReader original(golden("llama"));
  write_safetensors_folder(folder / "new/deep", copy_of(original), Bytes{100'000});
  expect_equal(original, SafetensorsReader(folder / "new/deep"));
}

TEST(SafetensorsWrite, ALaterSaveReplacesAllWeightFilesOfAnEarlierOneAndNothingElse) {
  const TempFolder folder;
  const std::vector<TensorSource> five{source("a", DType::u8, {5}, 1), source("b", DType::u8, {5}, 2)};
  const std::vector<TensorSource> later{source("c", DType::u8, {5}, 3)};
  const Names others{"config.json", "model-notes.safetensors", "pytorch_model.bin"};
  for (const std::string& name : others) write_file(folder / name, "kept");
  write_safetensors_folder(folder.path(), five, Bytes{5});
  write_safetensors_folder(folder.path(), later, Bytes{5});
  Names expected = others;
  expected.push_back("model.safetensors");
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(folder.file_names(), expected);
  EXPECT_EQ(SafetensorsReader(folder.path()).names(), (Names{"c"}));
  write_safetensors_folder(folder.path(), five, Bytes{5});
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  EXPECT_EQ(SafetensorsReader(folder.path()).names(), (Names{"a", "b"}));
}

TEST(SafetensorsWrite, AFailureLeavesTheEarlierSaveAndNoRest) {
  const TempFolder folder;
  const std::vector<TensorSource> earlier{source("a", DType::u8, {5}, 1), source("b", DType::u8, {5}, 2)};
  write_safetensors_folder(folder.path(), earlier, Bytes{5});
  const Names before = folder.file_names();
  std::vector<TensorSource> failing{source("a", DType::u8, {5}, 9), source("b", DType::u8, {5}, 9)};
  failing[1].fill = [](std::span<std::byte>) { throw std::runtime_error("gather failed"); };
  EXPECT_THROW(write_safetensors_folder(folder.path(), failing, Bytes{5}), std::runtime_error);
  EXPECT_THROW(write_safetensors(folder / "model-00001-of-00002.safetensors", failing), std::runtime_error);
  EXPECT_EQ(folder.file_names(), before);
  EXPECT_EQ(SafetensorsReader(folder.path()).tensor("a").bytes[0], std::byte{1});
}

TEST(SafetensorsWrite, AFullDiskIsAnErrorThatNamesTheFileAndLeavesNothing) {
  const TempFolder folder;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = message_of<FileError>(
      [&] { write_safetensors(folder / "t.safetensors", std::vector{source("a", DType::u8, {100'000}, 1)}); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(holds(message, {"t.safetensors", "cannot write", std::strerror(EFBIG)}));
  EXPECT_TRUE(folder.file_names().empty());
}

TEST(SafetensorsWrite, PlacesThatCannotBeWrittenAreNamed) {
  const TempFolder folder;
  const std::vector<TensorSource> tensors{source("a", DType::u8, {1}, 1)};
  EXPECT_TRUE(holds(message_of<FileError>([&] { write_safetensors(folder / "no/such/t.safetensors", tensors); }),
                    {"no/such/t.safetensors", std::strerror(ENOENT)}));
  std::filesystem::create_directory(folder / "taken");
  EXPECT_TRUE(holds(message_of<FileError>([&] { write_safetensors(folder / "taken", tensors); }), {"taken", "rename"}));
  write_file(folder / "file", "");
  EXPECT_TRUE(holds(message_of<FileError>([&] { write_safetensors_folder(folder / "file", tensors, Bytes{9}); }),
                    {"file", "cannot make this folder"}));
  EXPECT_EQ(folder.file_names(), (Names{"file", "taken"}));
}

TEST(SafetensorsWrite, WhatTheFormatCannotHoldIsRefusedBeforeAnythingIsWritten) {
  const TempFolder folder;
  const auto refused = [&](const TensorSource& one) {
    return message_of<InvalidArgument>([&] { write_safetensors(folder / "t", std::vector{one}); });
  };
  EXPECT_TRUE(holds(refused(source("__metadata__", DType::u8, {1}, 1)), {"__metadata__"}));
  EXPECT_TRUE(holds(refused(source("a", DType::u8, {-1}, 1)), {"\"a\"", "-1"}));
  EXPECT_TRUE(holds(refused(source("a", DType::f32, {std::int64_t{1} << 31, std::int64_t{1} << 31}, 1)), {"63 bits"}));
  EXPECT_TRUE(holds(refused(source("\xff", DType::u8, {1}, 1)), {"UTF-8"}));
  EXPECT_TRUE(holds(refused({"a", DType::u8, {1}, nullptr}), {"\"a\"", "fill"}));
  const std::vector twice{source("a", DType::u8, {1}, 1), source("a", DType::u8, {1}, 1)};
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { write_safetensors(folder / "t", twice); }), {"\"a\""}));
  EXPECT_TRUE(
      holds(message_of<InvalidArgument>([&] { write_safetensors_folder(folder.path(), twice, Bytes{0}); }), {"\"a\""}));
  const std::vector one{source("a", DType::u8, {1}, 1)};
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { write_safetensors_folder(folder.path(), one, Bytes{0}); }),
                    {"max_shard"}));
  EXPECT_TRUE(folder.file_names().empty());
}

TEST(SafetensorsWrite, AHeaderOverTheFormatsLimitIsRefusedBeforeAnythingIsWritten) {
  const TempFolder folder;
  const std::vector one{source(std::string(100'000'001, 'n'), DType::u8, {1}, 1)};
  const std::string message = message_of<InvalidArgument>([&] { write_safetensors(folder / "t", one); });
  EXPECT_TRUE(holds(message, {"100000000", "fewer tensors"}));
  EXPECT_TRUE(folder.file_names().empty());
}

TEST(SafetensorsWrite, AFolderIsCutSoThatEveryHeaderStaysWithinTheLimit) {
  const TempFolder folder;
  // Counted as if each byte of a name were escaped, so two of these do not fit one header.
  const std::string name(9'000'000, 'n');
  const std::vector<TensorSource> tensors{source(name + 'a', DType::u8, {1}, 1), source(name + 'b', DType::u8, {1}, 2)};
  write_safetensors_folder(folder.path(), tensors, Bytes{1'000'000});
  EXPECT_EQ(folder.file_names(), (Names{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                        "model.safetensors.index.json"}));
  EXPECT_EQ(SafetensorsReader(folder.path()).names().size(), 2u);
}

TEST(SafetensorsWrite, FortySavesLeakNoDescriptor) {
  const TempFolder folder;
  const std::vector<TensorSource> tensors{source("a", DType::u8, {5}, 1), source("b", DType::u8, {5}, 2)};
  write_safetensors_folder(folder.path(), tensors, Bytes{5});
  const std::int64_t before = open_descriptors();
  for (int i = 0; i < 40; ++i) {
    write_safetensors_folder(folder.path(), tensors, Bytes{i % 2 == 0 ? 100 : 5});
    ASSERT_EQ(SafetensorsReader(folder.path()).names().size(), 2u);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(SafetensorsWrite, OneTensorIsInMemoryAtATime) {
  const TempFolder folder;
  std::vector<TensorSource> tensors;
  int alive = 0;
  for (int i = 0; i < 3; ++i) {
    tensors.push_back({fmt::format("t{}", i), DType::u8, {7}, [&alive, i](std::span<std::byte> out) {
                         EXPECT_EQ(alive++, i);
                         EXPECT_EQ(out.size(), 7u);
                         std::fill(out.begin(), out.end(), static_cast<std::byte>(i));
                       }});
  }
  write_safetensors(folder / "t", tensors);
  EXPECT_EQ(alive, 3);
}

}  // namespace
}  // namespace spillway
