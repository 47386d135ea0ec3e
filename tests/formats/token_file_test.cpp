// SPDX-License-Identifier: Apache-2.0
#include "spillway/formats/token_file.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "formats/format_support.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::TempFolder;
using test::write_file;
using Row = std::vector<std::int64_t>;

template <typename T>
std::string as_bytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
template <typename T>
std::filesystem::path write_tokens(const TempFolder& folder, const std::string& name, const std::vector<T>& values) {
  write_file(folder / name, as_bytes(values));
  return folder / name;
}
std::vector<std::uint16_t> counting(std::size_t count) {
  std::vector<std::uint16_t> values(count);
  std::iota(values.begin(), values.end(), std::uint16_t{0});
  return values;
}
std::pair<Row, Row> read(const TokenFile& file, std::int64_t row, std::int64_t vocabulary) {
  Row inputs(static_cast<std::size_t>(file.length()));
  Row targets(inputs.size());
  file.read(row, vocabulary, inputs, targets);
  return {inputs, targets};
}
TensorSource matrix(const std::string& name, DType type, std::vector<std::int64_t> shape,
                    const std::vector<std::int32_t>& values) {
  return {name, type, std::move(shape),
          [values](std::span<std::byte> out) { std::memcpy(out.data(), values.data(), out.size()); }};
}

TEST(TokenFile, FlatRowsShareOneTokenAndTheShortRestIsLeftOut) {
  const TempFolder folder;
  const TokenFile file(write_tokens(folder, "t.bin", counting(12)), 3);
  EXPECT_EQ(file.rows(), 3);
  EXPECT_EQ(file.length(), 3);
  EXPECT_EQ(read(file, 0, 12), (std::pair{Row{0, 1, 2}, Row{1, 2, 3}}));
  EXPECT_EQ(read(file, 1, 12), (std::pair{Row{3, 4, 5}, Row{4, 5, 6}}));
  EXPECT_EQ(read(file, 2, 12), (std::pair{Row{6, 7, 8}, Row{7, 8, 9}}));
}

TEST(TokenFile, RowsAtTheEdges) {
  const TempFolder folder;
  const std::vector<std::array<std::int64_t, 3>> cases{{2, 1, 1}, {3, 1, 2}, {4, 3, 1},
                                                       {6, 3, 1}, {7, 3, 2}, {8, 7, 1}};
  for (const auto& [tokens, length, rows] : cases) {
    const TokenFile file(write_tokens(folder, "t.bin", counting(static_cast<std::size_t>(tokens))), length);
    EXPECT_EQ(file.rows(), rows) << tokens << " " << length;
    EXPECT_EQ(read(file, rows - 1, tokens).second.back(), rows * length);
  }
}

TEST(TokenFile, SixteenBitsReachTheirWholeRangeAndThirtyTwoMore) {
  const TempFolder folder;
  const TokenFile narrow(write_tokens<std::uint16_t>(folder, "t.bin", {65535, 0, 32768}), 2);
  EXPECT_EQ(read(narrow, 0, 65536), (std::pair{Row{65535, 0}, Row{0, 32768}}));
  const TokenFile wide(write_tokens<std::uint32_t>(folder, "t.u32.bin", {4294967295u, 7, 151936}), 2);
  EXPECT_EQ(read(wide, 0, std::int64_t{1} << 32), (std::pair{Row{4294967295, 7}, Row{7, 151936}}));
}

TEST(TokenFile, GoldenRowsAndLabels) {
  const TokenFile plain(golden("gpt2") / "rows.safetensors", 0);
  EXPECT_EQ(plain.rows(), 80);
  EXPECT_EQ(plain.length(), 48);
  const auto [inputs, targets] = read(plain, 79, 256);
  EXPECT_TRUE(std::equal(inputs.begin() + 1, inputs.end(), targets.begin()));

  const TokenFile labelled(golden("qwen2") / "rows.safetensors", 48);
  EXPECT_EQ(labelled.rows(), 240);
  std::int64_t masked = 0;
  for (std::int64_t row = 0; row < labelled.rows(); ++row) {
    const auto [in, out] = read(labelled, row, 256);
    for (std::size_t i = 0; i < out.size(); ++i) {
      masked += out[i] == -100 ? 1 : 0;
      if (out[i] != -100 && i + 1 < in.size()) {
        ASSERT_EQ(out[i], in[i + 1]);
      }
    }
  }
  EXPECT_GT(masked, 0);
}

TEST(TokenFile, TokensOutsideTheVocabularyAreNamedByRowAndPosition) {
  const TempFolder folder;
  const TokenFile file(write_tokens<std::uint16_t>(folder, "t.bin", {1, 2, 3, 4, 300, 5}), 2);
  EXPECT_NO_THROW(read(file, 0, 256));
  EXPECT_TRUE(holds(message_of<FileError>([&] { read(file, 1, 256); }), {"t.bin", "row 1, position 2", "300", "256"}));
  EXPECT_TRUE(holds(message_of<FileError>([&] { read(file, 0, 2); }), {"row 0, position 1", "token 2"}));

  write_safetensors(folder / "t.safetensors",
                    std::vector{matrix("tokens", DType::i32, {2, 3}, {1, 2, 3, 4, -1, 6}),
                                matrix("labels", DType::i32, {2, 3}, {-100, 2, -5, 4, 5, 6})});
  const TokenFile tensors(folder / "t.safetensors", 0);
  EXPECT_TRUE(holds(message_of<FileError>([&] { read(tensors, 0, 256); }), {"row 0, position 2", "label -5"}));
  EXPECT_TRUE(holds(message_of<FileError>([&] { read(tensors, 1, 256); }), {"row 1, position 1", "token -1"}));
}

TEST(TokenFile, DocumentsAreReadAndHaveNoTargetAtTheirEnds) {
  const TempFolder folder;
  const auto tokens = matrix("tokens", DType::i32, {2, 6}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0, 0});
  const auto documents = matrix("documents", DType::i32, {2, 6}, {0, 0, 0, 1, 1, 1, 5, 5, 6, 6, -1, -1});
  write_safetensors(folder / "t.safetensors", std::vector{tokens, documents});
  const TokenFile file(folder / "t.safetensors", 0);
  ASSERT_TRUE(file.has_documents());
  EXPECT_EQ(read(file, 0, 10), (std::pair{Row{1, 2, 3, 4, 5}, Row{2, 3, -100, 5, 6}}));
  EXPECT_EQ(read(file, 1, 10), (std::pair{Row{7, 8, 9, 1, 0}, Row{8, -100, 1, -100, -100}}));
  Row row(5);
  file.read_documents(1, row);
  EXPECT_EQ(row, (Row{5, 5, 6, 6, -1}));

  const auto labels = matrix("labels", DType::i32, {2, 6}, {1, 2, 3, 4, -100, 6, 7, 8, 9, 1, 3, 3});
  write_safetensors(folder / "t.safetensors", std::vector{tokens, labels, documents});
  const TokenFile labelled(folder / "t.safetensors", 5);
  EXPECT_EQ(read(labelled, 0, 10).second, (Row{2, 3, -100, -100, 6}));
  EXPECT_EQ(read(labelled, 1, 10).second, (Row{8, -100, 1, -100, -100}));
}

TEST(TokenFile, DocumentsThatAreNone) {
  const TempFolder folder;
  const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6};
  const auto tokens = matrix("tokens", DType::i32, {2, 3}, values);
  const auto refused = [&](const TensorSource& documents) {
    write_safetensors(folder / "t.safetensors", std::vector{tokens, documents});
    return message_of<FileError>([&] { TokenFile(folder / "t.safetensors", 0); });
  };
  EXPECT_TRUE(holds(refused(matrix("documents", DType::i32, {1, 3}, {0, 0, 0})), {"\"documents\" has 1 rows"}));
  EXPECT_TRUE(holds(refused(matrix("documents", DType::i32, {3, 2}, values)), {"1 tokens", "2 were asked for"}));
  EXPECT_TRUE(holds(refused(matrix("documents", DType::f32, {2, 3}, values)), {"\"documents\" is fp32"}));

  write_safetensors(folder / "t.safetensors",
                    std::vector{tokens, matrix("documents", DType::i32, {2, 3}, {0, 0, 0, 0, -2, 0})});
  const TokenFile file(folder / "t.safetensors", 0);
  Row row(2);
  EXPECT_NO_THROW(file.read_documents(0, row));
  EXPECT_TRUE(holds(message_of<FileError>([&] { file.read_documents(1, row); }), {"row 1, position 1", "document -2"}));
  EXPECT_TRUE(holds(message_of<FileError>([&] { read(file, 1, 10); }), {"row 1, position 1", "document -2"}));
  Row one(1);
  EXPECT_THROW(file.read_documents(0, one), InvalidArgument);
  EXPECT_THROW(file.read_documents(2, row), InvalidArgument);
  const TokenFile plain(write_tokens(folder, "t.bin", counting(7)), 3);
  EXPECT_FALSE(plain.has_documents());
  Row three(3);
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { plain.read_documents(0, three); }), {"\"documents\""}));
}

TEST(TokenFile, AMaskUnderAnotherNameIsRefused) {
  const TempFolder folder;
  const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6};
  for (const char* name : {"loss_mask", "targets", "Labels", "attention_mask"}) {
    write_safetensors(folder / "t.safetensors", std::vector{matrix("tokens", DType::i32, {2, 3}, values),
                                                            matrix(name, DType::i32, {2, 3}, values)});
    EXPECT_TRUE(
        holds(message_of<FileError>([&] { TokenFile(folder / "t.safetensors", 0); }), {name, "\"labels\"", "-100"}));
  }
}

TEST(TokenFile, AFileWithoutATargetIsRefused) {
  const TempFolder folder;
  const auto open = [&](const std::vector<std::int32_t>& labels, const std::vector<std::int32_t>& documents) {
    const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6};
    write_safetensors(folder / "t.safetensors", std::vector{matrix("tokens", DType::i32, {2, 3}, values),
                                                            matrix("labels", DType::i32, {2, 3}, labels),
                                                            matrix("documents", DType::i32, {2, 3}, documents)});
    return TokenFile(folder / "t.safetensors", 0).rows();
  };
  const std::vector<std::int32_t> one(6, 0), all{1, 2, 3, 4, 5, 6};
  EXPECT_EQ(open({-100, -100, -100, -100, -100, 6}, one), 2);
  const auto refused = [&](const std::vector<std::int32_t>& labels, const std::vector<std::int32_t>& documents) {
    return holds(message_of<FileError>([&] { open(labels, documents); }), {"2 rows", "has a target", "-100"});
  };
  EXPECT_TRUE(refused(std::vector<std::int32_t>(6, -100), one));
  EXPECT_TRUE(refused({1, -100, -100, 4, -100, -100}, one));  // what nothing comes before is not predicted
  EXPECT_TRUE(refused(all, {0, 1, 2, 0, -1, -1}));
  EXPECT_TRUE(refused({-100, -100, 3, -100, -100, 6}, {0, 0, 1, 0, 0, -1}));
}

TEST(TokenFile, ArgumentsOutOfRange) {
  const TempFolder folder;
  const auto path = write_tokens(folder, "t.bin", counting(7));
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { TokenFile(path, 0); }), {"t.bin", "at least 1"}));
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { TokenFile(path, -3); }), {"-3"}));
  const TokenFile file(path, 3);
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { read(file, 2, 9); }), {"row 2", "it has 2"}));
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { read(file, -1, 9); }), {"row -1"}));
  Row three(3);
  Row two(2);
  EXPECT_THROW(file.read(0, 9, three, two), InvalidArgument);
  EXPECT_THROW(file.read(0, 9, two, three), InvalidArgument);
}

TEST(TokenFile, FlatFilesThatAreNone) {
  const TempFolder folder;
  const auto refused = [&](const std::string& name, std::string_view content, std::int64_t length = 4) {
    write_file(folder / name, content);
    return message_of<FileError>([&] { TokenFile(folder / name, length); });
  };
  EXPECT_TRUE(holds(refused("a.bin", ""), {"a.bin", "0 tokens", "fewer than one row"}));
  EXPECT_TRUE(holds(refused("a.bin", "12345678"), {"4 tokens", "takes 4 and one"}));
  EXPECT_TRUE(holds(refused("a.bin", "123"), {"3 bytes", "2-byte"}));
  EXPECT_TRUE(holds(refused("a.u32.bin", "1234567890"), {"10 bytes", "4-byte"}));
  EXPECT_TRUE(holds(refused("a.bin", "ab", std::int64_t{1} << 62), {"1 tokens"}));
  EXPECT_TRUE(holds(refused("pytorch_model.bin", "PK\x03\x04 and so on"), {"zip archive"}));
  EXPECT_TRUE(holds(refused("a.bin", "version https://git-lfs.github.com/spec/v1\n"), {"git lfs pull"}));
  EXPECT_TRUE(holds(refused("a.txt", "text"), {"a.txt", "*.bin", "prepare_data.py"}));
  EXPECT_TRUE(holds(message_of<FileError>([&] { TokenFile(folder / "none.bin", 4); }), {"none.bin", "No such file"}));
  std::filesystem::create_directory(folder / "folder.bin");
  EXPECT_TRUE(holds(message_of<FileError>([&] { TokenFile(folder / "folder.bin", 4); }), {"regular file"}));
}

TEST(TokenFile, TensorFilesThatAreNone) {
  const TempFolder folder;
  const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const auto refused = [&](const std::vector<TensorSource>& tensors, std::int64_t length = 0) {
    write_safetensors(folder / "t.safetensors", tensors);
    return message_of<FileError>([&] { TokenFile(folder / "t.safetensors", length); });
  };
  const auto tokens = matrix("tokens", DType::i32, {2, 3}, values);
  EXPECT_TRUE(holds(refused({matrix("rows", DType::i32, {2, 3}, values)}), {"\"tokens\""}));
  EXPECT_TRUE(holds(refused({matrix("tokens", DType::i64, {2, 3}, values)}), {"\"tokens\" is int64 [2, 3]", "int32"}));
  EXPECT_TRUE(holds(refused({matrix("tokens", DType::i32, {6}, values)}), {"[6]", "[rows, length+1]"}));
  EXPECT_TRUE(holds(refused({matrix("tokens", DType::i32, {0, 3}, values)}), {"[0, 3]"}));
  EXPECT_TRUE(holds(refused({matrix("tokens", DType::i32, {3, 1}, values)}), {"[3, 1]"}));
  EXPECT_TRUE(holds(refused({tokens}, 3), {"rows have 2 tokens", "3 were asked for"}));
  EXPECT_TRUE(holds(refused({tokens, matrix("labels", DType::i32, {3, 3}, values)}), {"\"labels\" has 3 rows"}));
  EXPECT_TRUE(holds(refused({tokens, matrix("labels", DType::i32, {2, 4}, values)}), {"2 were asked for"}));
  EXPECT_TRUE(holds(refused({tokens, matrix("labels", DType::f32, {2, 3}, values)}), {"\"labels\" is fp32"}));
}

}  // namespace
}  // namespace spillway
