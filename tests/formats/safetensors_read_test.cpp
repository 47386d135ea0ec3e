// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "formats/format_support.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::raw_safetensors;
using test::TempFolder;
using test::write_file;
using Shape = std::vector<std::int64_t>;

float first_float(const TensorView& view) {
  float value = 0;
  std::memcpy(&value, view.bytes.data(), sizeof(value));
  return value;
}

SafetensorsReader open_raw(const TempFolder& folder, std::string_view header, std::string_view data) {
  write_file(folder / "t.safetensors", raw_safetensors(header, data));
  return SafetensorsReader(folder / "t.safetensors");
}

TEST(SafetensorsRead, GoldenFolderOfOneFile) {
  const SafetensorsReader reader(golden("gpt2"));
  EXPECT_EQ(reader.names().size(), 28u);
  const TensorView wte = reader.tensor("transformer.wte.weight");
  EXPECT_EQ(wte.dtype, DType::f32);
  EXPECT_EQ(wte.shape, (Shape{256, 64}));
  EXPECT_EQ(wte.numel(), 256 * 64);
  EXPECT_EQ(wte.bytes.size(), 256u * 64u * 4u);
  EXPECT_TRUE(std::isfinite(first_float(wte)));
  EXPECT_NE(first_float(wte), 0.0f);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  EXPECT_EQ(reader.path(), golden("gpt2"));
}

TEST(SafetensorsRead, GoldenShardsEqualWhatTheIndexSays) {
  const SafetensorsReader reader(golden("llama"));
  EXPECT_EQ(reader.names().size(), 21u);
  EXPECT_TRUE(reader.contains("lm_head.weight"));
  const SafetensorsReader by_index(golden("llama") / "model.safetensors.index.json");
  EXPECT_EQ(by_index.names(), reader.names());
  const SafetensorsReader one(golden("llama") / "model-00001-of-00002.safetensors");
  EXPECT_LT(one.names().size(), reader.names().size());
  for (std::size_t i = 0; i < one.names().size(); ++i) EXPECT_EQ(one.names()[i], reader.names()[i]);
}

TEST(SafetensorsRead, ValuesShapesAndOrderOfAHandMadeFile) {
  const TempFolder folder;
  std::string data(12, '\0');
  const float value = 1.5f;
  std::memcpy(data.data() + 4, &value, 4);
  // The header names them in another order than their bytes stand.
  const auto reader = open_raw(folder,
                               R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
                               R"("__metadata__":{"made":"here"},)"
                               R"("a":{"data_offsets":[0,4],"shape":[2,2],"dtype":"U8"}}   )",
                               data);
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(first_float(reader.tensor("b")), 1.5f);
  EXPECT_EQ(reader.tensor("a").dtype, DType::u8);
  EXPECT_EQ(reader.metadata().at("made"), "here");
}

TEST(SafetensorsRead, ScalarsAndEmptyTensorsAreTensors) {
  const TempFolder folder;
  const auto reader = open_raw(folder,
                               R"({"none":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]},)"
                               R"("one":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},)"
                               R"("end":{"dtype":"I64","shape":[3,0],"data_offsets":[2,2]}})",
                               "ab");
  EXPECT_EQ(reader.tensor("none").numel(), 0);
  EXPECT_EQ(reader.tensor("none").shape, (Shape{0, 5}));
  EXPECT_EQ(reader.tensor("one").numel(), 1);
  EXPECT_TRUE(reader.tensor("one").shape.empty());
  EXPECT_EQ(reader.tensor("end").bytes.size(), 0u);
}

TEST(SafetensorsRead, AFileOfNoTensorsIsValid) {
  const TempFolder folder;
  EXPECT_TRUE(open_raw(folder, "{}", "").names().empty());
  EXPECT_TRUE(open_raw(folder, R"({"__metadata__":{}})", "").metadata().empty());
}

TEST(SafetensorsRead, EveryElementTypeIsRead) {
  const TempFolder folder;
  const std::vector<std::pair<const char*, DType>> words{
      {"F64", DType::f64}, {"F32", DType::f32}, {"F16", DType::f16},     {"BF16", DType::bf16}, {"I64", DType::i64},
      {"I32", DType::i32}, {"I16", DType::i16}, {"I8", DType::i8},       {"U64", DType::u64},   {"U32", DType::u32},
      {"U16", DType::u16}, {"U8", DType::u8},   {"BOOL", DType::boolean}};
  for (const auto& [word, type] : words) {
    const auto bytes = static_cast<std::size_t>(3 * size_of(type));
    const std::string header = std::string(R"({"t":{"dtype":")") + word + R"(","shape":[3],"data_offsets":[0,)" +
                               std::to_string(bytes) + "]}}";
    const auto reader = open_raw(folder, header, std::string(bytes, 'x'));
    EXPECT_EQ(reader.tensor("t").dtype, type) << word;
    EXPECT_EQ(reader.tensor("t").numel(), 3) << word;
  }
}

TEST(SafetensorsRead, ATypeThatIsNotComputedWithIsRefusedOnlyWhenRead) {
  const TempFolder folder;
  const auto reader = open_raw(folder,
                               R"({"w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},)"
                               R"("s":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                               "12345678");
  EXPECT_TRUE(reader.contains("w"));
  EXPECT_EQ(reader.tensor("s").numel(), 1);
  const std::string message = message_of<FileError>([&] { reader.tensor("w"); });
  EXPECT_TRUE(holds(message, {"t.safetensors", "\"w\"", "F8_E4M3", "BF16"}));
}

TEST(SafetensorsRead, AMissingTensorNamesTheNearest) {
  const SafetensorsReader reader(golden("qwen2"));
  const std::string message = message_of<FileError>([&] { reader.tensor("model.layers.0.self_attn.q_proj.weights"); });
  EXPECT_TRUE(
      holds(message, {"qwen2", "q_proj.weights", "nearest name is \"model.layers.0.self_attn.q_proj.weight\""}));
}

TEST(SafetensorsRead, TheHeaderLimitIsAnArgumentAndBothSizesAreNamed) {
  const TempFolder folder;
  const std::string header = R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  write_file(folder / "t.safetensors", raw_safetensors(header, "x"));
  const auto size = static_cast<std::int64_t>(header.size());
  EXPECT_EQ(SafetensorsReader(folder / "t.safetensors", Bytes{size}).names().size(), 1u);
  const std::string message =
      message_of<FileError>([&] { SafetensorsReader(folder / "t.safetensors", Bytes{size - 1}); });
  EXPECT_TRUE(holds(message, {std::to_string(size), "limit of " + std::to_string(size - 1)}));
}

TEST(SafetensorsRead, AReaderMovesAndItsViewsStayValid) {
  SafetensorsReader first(golden("gpt2"));
  const TensorView view = first.tensor("transformer.ln_f.weight");
  const float before = first_float(view);
  SafetensorsReader second(std::move(first));
  EXPECT_EQ(first_float(view), before);
  EXPECT_EQ(second.tensor("transformer.ln_f.weight").bytes.data(), view.bytes.data());
}

TEST(SafetensorsRead, ReplacingAFileWhileItIsReadKeepsTheOldBytes) {
  const TempFolder folder;
  const std::string header = R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const auto reader = open_raw(folder, header, "a");
  write_file(folder / "new", raw_safetensors(header, "b"));
  std::filesystem::rename(folder / "new", folder / "t.safetensors");
  EXPECT_EQ(static_cast<char>(reader.tensor("t").bytes[0]), 'a');
}

TEST(SafetensorsRead, SeveralThreadsReadOneReader) {
  const SafetensorsReader reader(golden("llama"));
  std::vector<double> sums(4);
  std::vector<std::thread> threads;
  for (double& sum : sums) {
    threads.emplace_back([&reader, &sum] {
      for (const std::string& name : reader.names()) sum += first_float(reader.tensor(name));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (double sum : sums) EXPECT_EQ(sum, sums.front());
}

}  // namespace
}  // namespace spillway
