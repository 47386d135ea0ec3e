// SPDX-License-Identifier: Apache-2.0
// Files that are damaged, wrong or made to harm: each is refused with the file's name and what is wrong, and nothing of
// it is handed out.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "formats/format_support.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::raw_safetensors;
using test::read_file;
using test::TempFolder;
using test::write_file;

class SafetensorsHostile : public ::testing::Test {
 protected:
  std::string refusal(std::string_view content) {
    write_file(folder_ / "t.safetensors", content);
    return message_of<FileError>([&] { SafetensorsReader(folder_ / "t.safetensors"); });
  }
  std::string header_refusal(std::string_view header, std::string_view data = "") {
    return refusal(raw_safetensors(header, data));
  }
  std::string folder_refusal() {
    return message_of<FileError>([&] { SafetensorsReader(folder_.path()); });
  }
  void write_index(const std::string& weight_map) {
    write_file(folder_ / "model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + weight_map + "}");
  }

  TempFolder folder_;
};

std::string entry(std::string_view name, std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

TEST_F(SafetensorsHostile, TruncatedAtEveryByte) {
  const std::string whole = raw_safetensors("{" + entry("a", "F32", "[2]", "[0,8]") + "," +
                                                entry("b", "BF16", "[1,3]", "[8,14]") + R"(,"__metadata__":{"k":"v"}})",
                                            "0123456789abcd");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string message = refusal(whole.substr(0, size));
    EXPECT_TRUE(holds(message, {"t.safetensors"})) << size;
    if (size >= 8) {
      // What is there and what is needed: of the file, or of the tensors' data.
      const std::string there = std::to_string(size);
      const std::string data = std::to_string(size - std::min(size, whole.size() - 14));
      EXPECT_TRUE(holds(message, {"truncated"})) << size;
      EXPECT_TRUE(holds(message, {size < whole.size() - 14 ? there : "14 bytes"})) << message;
      EXPECT_TRUE(holds(message, {size < whole.size() - 14 ? there : data})) << message;
    }
  }
  write_file(folder_ / "t.safetensors", whole);
  EXPECT_EQ(SafetensorsReader(folder_ / "t.safetensors").names().size(), 2u);
}

TEST_F(SafetensorsHostile, OneByteChangedIsRefusedOrReadWithinTheFile) {
  const std::string whole = raw_safetensors(
      "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "I8", "[3]", "[8,11]") + "}", "0123456789a");
  int refused = 0;
  for (std::size_t at = 0; at < whole.size() - 11; ++at) {
    for (const unsigned char flip : {0x01, 0x20, 0x80, 0xff}) {
      std::string changed = whole;
      changed[at] = static_cast<char>(static_cast<unsigned char>(changed[at]) ^ flip);
      write_file(folder_ / "t.safetensors", changed);
      try {
        const SafetensorsReader reader(folder_ / "t.safetensors");
        std::size_t bytes = 0;
        for (const std::string& name : reader.names()) bytes += reader.tensor(name).bytes.size();
        EXPECT_LE(bytes, 11u);
      } catch (const FileError& error) {
        EXPECT_TRUE(holds(error.what(), {"t.safetensors"}));
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 300);
}

TEST_F(SafetensorsHostile, AHeaderLengthThatLies) {
  const std::string whole = raw_safetensors("{" + entry("a", "U8", "[1]", "[0,1]") + "}", "x");
  const auto with_length = [&](std::uint64_t length) {
    std::string changed = whole;
    for (int i = 0; i < 8; ++i) changed[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
    return refusal(changed);
  };
  const std::uint64_t size = whole.size() - 9;
  EXPECT_TRUE(holds(with_length(0), {"does not begin with '{'"}));
  EXPECT_TRUE(holds(with_length(size - 1), {"not valid JSON"}));
  EXPECT_TRUE(holds(with_length(size + 1), {"not valid JSON"}));
  EXPECT_TRUE(holds(with_length(size + 2), {"truncated"}));
  EXPECT_TRUE(holds(with_length(100'000'001), {"100000001", "limit of 100000000"}));
  for (const std::uint64_t huge : {~0ull, ~0ull - 7, 1ull << 63, 1ull << 32}) {
    EXPECT_TRUE(holds(with_length(huge), {std::to_string(huge), "limit"}));
  }
}

TEST_F(SafetensorsHostile, OffsetsThatDoNotTile) {
  const auto two = [&](const char* a, const char* b, std::string_view data = "01234567") {
    return header_refusal("{" + entry("a", "U8", "[4]", a) + "," + entry("b", "U8", "[4]", b) + "}", data);
  };
  EXPECT_TRUE(holds(two("[0,4]", "[3,7]", "0123456"), {"\"b\"", "byte 3", "overlapping"}));
  EXPECT_TRUE(holds(two("[0,4]", "[0,4]", "0123"), {"overlapping"}));
  EXPECT_TRUE(holds(two("[0,4]", "[5,9]", "012345678"), {"\"b\"", "gap"}));
  EXPECT_TRUE(holds(two("[1,5]", "[5,9]", "012345678"), {"\"a\"", "byte 1", "gap"}));
  EXPECT_TRUE(holds(two("[0,4]", "[4,8]", "012345678"), {"1 trailing bytes"}));
  EXPECT_TRUE(holds(two("[0,4]", "[4,8]", std::string(24, 'x')), {"16 trailing bytes"}));
  EXPECT_TRUE(holds(two("[0,4]", "[4,8]", "0123456"), {"truncated", "8 bytes", "7 are there"}));
  EXPECT_TRUE(holds(two("[4,0]", "[4,8]"), {"\"a\"", "before its start"}));
  EXPECT_TRUE(holds(two("[0,5]", "[5,8]"), {"\"a\"", "needs 4 bytes", "give 5"}));
  EXPECT_TRUE(holds(two("[0,4]", "[18446744073709551612,18446744073709551615]"), {"needs 4 bytes"}));
  EXPECT_TRUE(holds(header_refusal("{" + entry("w", "F8_E5M2", "[1]", "[0,18446744073709551615]") + "}", "x"),
                    {"truncated", "18446744073709551615"}));
}

TEST_F(SafetensorsHostile, TheOrderOfTheHeaderDoesNotMatter) {
  write_file(folder_ / "t.safetensors",
             raw_safetensors("{" + entry("z", "U8", "[4]", "[4,8]") + "," + entry("a", "U8", "[4]", "[0,4]") + "}",
                             "aaaazzzz"));
  const SafetensorsReader reader(folder_ / "t.safetensors");
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"a", "z"}));
  EXPECT_EQ(static_cast<char>(reader.tensor("z").bytes[0]), 'z');
}

TEST_F(SafetensorsHostile, ShapesWhoseProductOverflows) {
  for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775807]", "[3037000500,3037000500]",
                            "[0,9223372036854775807,2]", "[4294967296,0,4294967296]"}) {
    EXPECT_TRUE(holds(header_refusal("{" + entry("a", "F32", shape, "[0,0]") + "}"), {"\"a\"", "63 bits"})) << shape;
  }
  EXPECT_TRUE(
      holds(header_refusal("{" + entry("a", "F32", "[9223372036854775808]", "[0,0]") + "}"), {"9223372036854775808"}));
  std::string many = "[1";
  for (int i = 0; i < 64; ++i) many += ",1";
  EXPECT_TRUE(holds(header_refusal("{" + entry("a", "U8", many + "]", "[0,1]") + "}", "x"), {"64 dimensions"}));
}

TEST_F(SafetensorsHostile, WrongKindsOfValues) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"[]", "'{'"},
      {"null", "'{'"},
      {R"({"a":1})", "an object belongs (key \"a\")"},
      {R"({"a":[]})", "an object belongs"},
      {R"({"a":null})", "null where an object"},
      {R"({"a":{}})", "no \"dtype\""},
      {R"({"a":{"dtype":"F32","shape":[]}})", "no \"data_offsets\""},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "no \"shape\""},
      {R"({"a":{"dtype":7,"shape":[],"data_offsets":[0,4]}})", "key \"dtype\""},
      {R"({"a":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}})", "key \"dtype\""},
      {R"({"a":{"dtype":{},"shape":[],"data_offsets":[0,4]}})", "key \"dtype\""},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "-1"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "1.0"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", "a string where a size"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "a list where a size"},
      {R"({"a":{"dtype":"F32","shape":4,"data_offsets":[0,4]}})", "a list belongs"},
      {R"({"a":{"dtype":"F32","shape":"4","data_offsets":[0,4]}})", "key \"shape\""},
      {R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", "true or false"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})", "1 data_offsets instead of 2"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,8]}})", "a third number"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[-4,0]}})", "-4"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,1e1]}})", "1e1"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,99999999999999999999]}})", "99999999999999999999"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":{}}})", "an object where"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"extra":1}})", "unknown key \"extra\""},
      {R"({"__metadata__":{"a":1}})", "a string belongs"},
      {R"({"__metadata__":{"a":{}}})", "a string belongs"},
      {R"({"__metadata__":["a"]})", "an object belongs"},
      {R"({} {})", "not valid JSON"},
      {R"({"a)", "not valid JSON"},
      {"{\"\xff\":{}}", "not valid JSON"},
      {std::string("{}\0x", 4), "NUL"},
      {std::string(100000, '['), "'{'"},
      {R"({"a":{"dtype":)" + std::string(100000, '['), "a list where"}};
  for (const auto& [header, words] : cases) {
    EXPECT_TRUE(holds(header_refusal(header, "1234"), {"t.safetensors", words})) << header.substr(0, 80);
  }
}

TEST_F(SafetensorsHostile, NamesThatStandTwice) {
  const std::string a = entry("a", "U8", "[1]", "[0,1]");
  EXPECT_TRUE(
      holds(header_refusal("{" + a + "," + entry("a", "U8", "[1]", "[1,2]") + "}", "xy"), {"names \"a\" twice"}));
  EXPECT_TRUE(holds(header_refusal("{" + a + "," + a + "}", "x"), {"names \"a\" twice"}));
  EXPECT_TRUE(holds(header_refusal(R"({"__metadata__":{},"__metadata__":{}})"), {"\"__metadata__\" twice"}));
  EXPECT_TRUE(holds(header_refusal(R"({"__metadata__":{"k":"1","k":"2"}})"), {"metadata key \"k\" twice"}));
  EXPECT_TRUE(holds(header_refusal(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x"),
                    {"two \"dtype\""}));
  // Escapes spell the same name.
  EXPECT_TRUE(
      holds(header_refusal("{" + a + "," + entry("\\u0061", "U8", "[1]", "[1,2]") + "}", "xy"), {"\"a\" twice"}));
}

TEST_F(SafetensorsHostile, OtherFormatsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {std::string("PK\x03\x04\x14\x00\x00\x00", 8) + "archive/data.pkl", "zip archive (a PyTorch checkpoint"},
      {"\x80\x02}q\x01(X\x03", "pickle"},
      {"\x80\x04\x95 and more", "pickle"},
      {std::string("GGUF\x03\x00\x00\x00", 8), "GGUF"},
      {"\x89HDF\r\n\x1a\n and so on", "HDF5"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"},
      {"\x93NUMPY\x01", "NumPy"},
      {"<!DOCTYPE html><html>", "HTML"},
      {"<html>", "HTML"},
      {"\x1f\x8b\x08 and so on", "gzip"},
      {"{\"weight_map\":{}}", "not a safetensors file"},
      {"", "0 bytes"}};
  for (const auto& [content, words] : cases) EXPECT_TRUE(holds(refusal(content), {"t.safetensors", words})) << words;
}

// The first bytes are the header's length: 640, 896, 1152 and 1408 spell the beginning of a pickle, as do these and any
// number times 65536.
TEST_F(SafetensorsHostile, NoLengthOfAHeaderIsTakenForAnotherFormat) {
  const std::string header = "{" + entry("a", "F32", "[1]", "[0,4]") + "}";
  for (std::size_t length = 128; length <= 68096; length += length < 4096 ? 8 : 128) {
    std::string padded = header;
    padded.resize(length, ' ');
    write_file(folder_ / "t.safetensors", raw_safetensors(padded, "0123"));
    EXPECT_NO_THROW(SafetensorsReader(folder_ / "t.safetensors")) << length;
  }
}

TEST_F(SafetensorsHostile, PathsThatAreNoFiles) {
  const auto opened = [](const std::filesystem::path& path) {
    return message_of<FileError>([&] { SafetensorsReader{path}; });
  };
  EXPECT_TRUE(holds(opened(folder_ / "none.safetensors"), {"none.safetensors", "No such file"}));
  EXPECT_TRUE(holds(opened("/dev/null"), {"/dev/null", "regular file"}));
  EXPECT_TRUE(holds(opened(folder_ / std::string(5000, 'n')), {"nnn", "File name too long"}));
  ASSERT_EQ(mkfifo((folder_ / "pipe.safetensors").c_str(), 0600), 0);
  EXPECT_TRUE(holds(opened(folder_ / "pipe.safetensors"), {"pipe.safetensors", "regular file"}));
}

TEST_F(SafetensorsHostile, FoldersWithoutWeightsSayWhatTheyHold) {
  EXPECT_TRUE(holds(folder_refusal(), {folder_.path().string(), "model.safetensors"}));
  write_file(folder_ / "pytorch_model.bin", "");
  EXPECT_TRUE(holds(folder_refusal(), {"pytorch_model.bin", "convert"}));
  std::filesystem::remove(folder_ / "pytorch_model.bin");
  write_file(folder_ / "adapter.safetensors", "");
  EXPECT_TRUE(holds(folder_refusal(), {"adapter.safetensors", "own name"}));
}

TEST_F(SafetensorsHostile, AnIndexThatNamesFilesElsewhere) {
  const auto outside = std::filesystem::temp_directory_path() / "weights.safetensors";
  for (const std::string& name :
       {std::string("../weights.safetensors"), outside.string(), std::string("a/b.safetensors"),
        std::string("a\\\\b.safetensors"), std::string(".."), std::string("."), std::string(""),
        std::string("..\\\\x.safetensors"), std::string("a.safetensors\\u0000"), std::string("pytorch_model.bin")}) {
    write_index(R"({"w":")" + name + "\"}");
    EXPECT_TRUE(holds(folder_refusal(), {"model.safetensors.index.json", "not a shard's name"})) << name;
  }
}

TEST_F(SafetensorsHostile, AnIndexThatIsNone) {
  const auto with = [&](std::string_view content) {
    write_file(folder_ / "model.safetensors.index.json", content);
    return folder_refusal();
  };
  EXPECT_TRUE(holds(with(""), {"model.safetensors.index.json", "not valid JSON"}));
  EXPECT_TRUE(holds(with("[]"), {"not a JSON object"}));
  EXPECT_TRUE(holds(with("{}"), {"weight_map"}));
  EXPECT_TRUE(holds(with(R"({"weight_map":[]})"), {"weight_map"}));
  EXPECT_TRUE(holds(with(R"({"weight_map":{}})"), {"empty"}));
  EXPECT_TRUE(holds(with(R"({"weight_map":{"a":1}})"), {"\"a\"", "not a string"}));
  EXPECT_TRUE(holds(with(R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})"), {"\"a\" stands twice"}));
  EXPECT_TRUE(holds(with(R"({"weight_map":)" + std::string(100000, '[')), {"nests deeper"}));
  EXPECT_TRUE(holds(with("version https://git-lfs.github.com/spec/v1\n"), {"not valid JSON"}));
}

TEST_F(SafetensorsHostile, ShardsAndIndexThatDisagree) {
  const std::string a = raw_safetensors("{" + entry("a", "U8", "[1]", "[0,1]") + "}", "a");
  const std::string b = raw_safetensors("{" + entry("b", "U8", "[1]", "[0,1]") + "}", "b");
  write_file(folder_ / "1.safetensors", a);
  write_index(R"({"a":"1.safetensors","b":"2.safetensors"})");
  EXPECT_TRUE(holds(folder_refusal(), {"2.safetensors", "missing", "\"b\"", "index"}));
  write_file(folder_ / "2.safetensors", a);
  EXPECT_TRUE(holds(folder_refusal(), {"2.safetensors", "\"a\"", "1.safetensors too"}));
  write_file(folder_ / "2.safetensors", b.substr(0, b.size() - 1));
  EXPECT_TRUE(holds(folder_refusal(), {"2.safetensors", "truncated"}));
  write_file(folder_ / "2.safetensors", b);
  EXPECT_EQ(SafetensorsReader(folder_.path()).names(), (std::vector<std::string>{"a", "b"}));
  write_index(R"({"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"})");
  EXPECT_TRUE(holds(folder_refusal(), {"2.safetensors", "\"c\" is missing"}));
  write_index(R"({"a":"2.safetensors","b":"1.safetensors"})");
  EXPECT_TRUE(holds(folder_refusal(), {"1.safetensors", "\"a\"", "does not place there"}));
  write_index(R"({"a":"1.safetensors"})");
  EXPECT_EQ(SafetensorsReader(folder_.path()).names(), (std::vector<std::string>{"a"}));
}

// Every way to a file gives the same verdict: alone, as the folder's file, as a shard.
TEST_F(SafetensorsHostile, EveryPathToAFileGivesTheSameVerdict) {
  const std::string good = raw_safetensors("{" + entry("a", "U8", "[2]", "[0,2]") + "}", "xy");
  const std::vector<std::pair<std::string, bool>> files{
      {good, true},
      {good + std::string(16, '\0'), false},
      {good.substr(0, good.size() - 1), false},
      {raw_safetensors("{" + entry("a", "U8", "[1]", "[1,2]") + "}", "xy"), false}};
  for (const auto& [content, accepted] : files) {
    const TempFolder sharded;
    write_file(folder_ / "model.safetensors", content);
    write_file(sharded / "1.safetensors", content);
    write_file(sharded / "model.safetensors.index.json", R"({"weight_map":{"a":"1.safetensors"}})");
    for (const auto& path :
         {folder_ / "model.safetensors", folder_.path(), sharded.path(), sharded / "model.safetensors.index.json"}) {
      if (accepted) {
        EXPECT_EQ(SafetensorsReader(path).tensor("a").bytes.size(), 2u);
      } else {
        EXPECT_THROW(SafetensorsReader{path}, FileError) << path;
      }
    }
  }
}

TEST_F(SafetensorsHostile, AGoldenFileTruncatedAtEveryKilobyte) {
  const std::string whole = read_file(golden("gpt2") / "model.safetensors").substr(0, 65536);
  for (std::size_t size = 0; size < whole.size(); size += 1024) {
    EXPECT_TRUE(holds(refusal(whole.substr(0, size)), {"t.safetensors", "bytes"})) << size;
  }
}

}  // namespace
}  // namespace spillway
