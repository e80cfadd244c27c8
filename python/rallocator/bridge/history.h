// Recordings, snapshots, and what a program or torch's compiler says of its memory.
#pragma once

#include "pools.h"

namespace rallocator {
namespace {

class History : public Pools {
 public:
  bool isHistoryEnabled() override {
    return api->is_recording();
  }

#if TORCH_RELEASE >= 211
  SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override {
#else
  SnapshotInfo snapshot(MempoolId_t pool) override {
    constexpr bool include_traces = true;
#endif
    SnapshotInfo info;
    info.device_traces.resize(include_traces ? api->device_count() : 0);
    const auto segment = [](void* info, const rallocator_segment* segment) {
      static_cast<SnapshotInfo*>(info)->segments.push_back(segment_info(*segment));
    };
    const auto event = [](void* info, const rallocator_event* event) {
      auto& traces = static_cast<SnapshotInfo*>(info)->device_traces;
      if (traces.size() <= static_cast<size_t>(event->device)) {
        traces.resize(event->device + 1);
      }
      traces[event->device].push_back(trace_entry(*event));
    };
    rallocator_memory_visitor visitor{&info, segment, nullptr};
    if (include_traces) {
      visitor.event = event;
    }
    api->visit_memory(pool.first, pool.second, &visitor);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      info.external_annotations.assign(annotations_.begin(), annotations_.end());
    }
    rallocator_settings settings;
    api->settings(&settings);
    auto& config = info.config_metadata;
    config.garbage_collection_threshold = settings.garbage_collection_threshold;
    config.max_split_size =
        settings.max_split_size < 0 ? std::numeric_limits<size_t>::max() : static_cast<size_t>(settings.max_split_size);
    config.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
    config.expandable_segments = settings.expandable_segments;
    config.release_lock_on_malloc = false;
    config.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
    config.graph_capture_record_stream_reuse = false;
    config.last_allocator_settings = settings.text;
    config.roundup_power2_divisions.assign(
        std::begin(settings.roundup_power2_divisions), std::end(settings.roundup_power2_divisions));
#if TORCH_RELEASE >= 213
    config.max_round_threshold = std::numeric_limits<size_t>::max();
    config.max_cached_size = std::numeric_limits<size_t>::max();
#endif
    return info;
  }

#if TORCH_RELEASE >= 211
  void recordHistory(
      bool enabled,
      CreateContextFn recorder,
      size_t max_entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skipped) override {
#else
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear)
      override {
    const std::vector<std::string> skipped;
#endif
    TORCH_CHECK(when == RecordContext::NEVER || recorder, "a context recorder is needed to record contexts");
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      annotation_limit_ = enabled ? std::max<size_t>(max_entries, 1) : 0;
      if (!enabled || clear) {
        annotations_.clear();
      }
    }
    if (!enabled) {
      check(api->record_history(nullptr, true));
      contexts().set_recorder(nullptr);
      contexts().drop_unnamed();
      return;
    }
    contexts().set_recorder(when == RecordContext::NEVER ? nullptr : recorder);
    rallocator_recording recording{};
    recording.limit = std::max<size_t>(max_entries, 1);
    recording.skipped_actions = action_bits(skipped);
    recording.events_have_stacks = when >= RecordContext::ALLOC;
    recording.takes_on_free = when >= RecordContext::ALL;
    if (when != RecordContext::NEVER) {
      recording.take_stack = [] { return contexts().take(); };
      recording.stack_noted = [](uint32_t stack) { contexts().noted(stack); };
    }
    check(api->record_history(&recording, clear));
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    if (!api->is_recording()) {
      return;
    }
    AnnotationEntry entry(c10::cuda::current_device(), 0);
    entry.time_.t_ = now_us();
    for (const auto& [key, value] : metadata) {
      entry.recordUserMetadata(key, value);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (annotation_limit_ == 0) {
      return;
    }
    if (annotations_.size() >= annotation_limit_) {
      annotations_.pop_front();
    }
    annotations_.push_back(std::move(entry));
  }

  void pushCompileContext(std::string& context) override {
    compile_contexts().push_back(context);
    api->set_compile_context(context.c_str());
  }

  void popCompileContext() override {
    auto& contexts = compile_contexts();
    if (!contexts.empty()) {
      contexts.pop_back();
    }
    api->set_compile_context(contexts.empty() ? "" : contexts.back().c_str());
  }

#if TORCH_RELEASE >= 210
  void setUserMetadata(const std::string& metadata) override {
    api->set_label(metadata.c_str());
  }

  std::string getUserMetadata() override {
    return api->label();
  }
#endif

#if TORCH_RELEASE >= 212
  std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
    return contexts().find(api->stack_of(const_cast<void*>(address)));
  }
#endif

#if TORCH_RELEASE >= 214
  bool supportsUserMetadata() override {
    return true;
  }

  void annotateMemory(const void* address, const std::string& metadata) override {
    api->annotate(const_cast<void*>(address), metadata.c_str());
  }
#endif

  // Told of memory that comes and goes, which is what communicators register; not of each allocation.
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    const auto told = [](void* tracker, const rallocator_event* event) {
      try {
        auto entry = trace_entry(*event);
        entry.time_.approx_t_ = c10::getApproximateTime();
        (*static_cast<AllocatorTraceTracker*>(tracker))(entry);
      } catch (const std::exception& error) {
        TORCH_WARN("a tracker of memory failed: ", error.what());
      } catch (...) {
        TORCH_WARN("a tracker of memory failed");
      }
    };
    // It is told as long as the process lives, also by devices that work where one has failed.
    check(api->add_tracker(told, new AllocatorTraceTracker(std::move(tracker))));
  }

 private:
  static uint32_t action_bits(const std::vector<std::string>& names) {
    static const std::unordered_map<std::string, uint32_t> ACTIONS{
        {"alloc", RALLOCATOR_ALLOC},
        {"free_requested", RALLOCATOR_FREE_REQUESTED},
        {"free_completed", RALLOCATOR_FREE_COMPLETED},
        {"segment_alloc", RALLOCATOR_SEGMENT_ALLOC},
        {"segment_free", RALLOCATOR_SEGMENT_FREE},
        {"segment_map", RALLOCATOR_SEGMENT_MAP},
        {"segment_unmap", RALLOCATOR_SEGMENT_UNMAP},
        {"oom", RALLOCATOR_OOM},
        {"snapshot", RALLOCATOR_SNAPSHOT},
        {"annotate", RALLOCATOR_ANNOTATE},
    };
    uint32_t bits = 0;
    for (const auto& name : names) {
      const auto found = ACTIONS.find(name);
      TORCH_CHECK_VALUE(found != ACTIONS.end(), "there is no action \"", name, "\" to skip");
      bits |= 1u << found->second;
    }
    return bits;
  }

  static std::vector<std::string>& compile_contexts() {
    thread_local std::vector<std::string> contexts;
    return contexts;
  }

  std::mutex mutex_;  // Of all that follows.
  std::deque<AnnotationEntry> annotations_;
  size_t annotation_limit_ = 0;
};

}  // namespace
}  // namespace rallocator
