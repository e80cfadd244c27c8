// rallocator's statistics, segments and events, as torch lays them out.
#pragma once

#include "contexts.h"

namespace rallocator {
namespace {

template <typename Stat>
void copy(Stat& to, const rallocator_counter& from) {
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
}

template <typename StatArray>
void copy_family(StatArray& to, const rallocator_family& from) {
  copy(to[0], from.all);  // The order of c10's StatType.
  copy(to[1], from.small_pool);
  copy(to[2], from.large_pool);
}

SegmentInfo segment_info(const rallocator_segment& segment) {
  SegmentInfo info;
  info.device = static_cast<DeviceIndex>(segment.device);
  info.address = reinterpret_cast<size_t>(segment.address);
  info.total_size = segment.size;
  info.stream = static_cast<cudaStream_t>(segment.stream);
  info.is_large = segment.is_large;
  info.is_expandable = segment.is_expandable;
  info.owner_private_pool_id = {segment.pool_first, segment.pool_second};
  info.context_when_allocated = contexts().find(segment.stack);
  info.blocks.reserve(segment.block_count);
  for (size_t i = 0; i < segment.block_count; i++) {
    const auto& block = segment.blocks[i];
    BlockInfo block_info;
    block_info.size = block.size;
    block_info.requested_size = block.requested;
    block_info.allocated = block.state == RALLOCATOR_ALLOCATED;
    block_info.active = block.state != RALLOCATOR_INACTIVE;
    block_info.context_when_allocated = contexts().find(block.stack);
    if (block_info.active) {
      info.active_size += block.size;
      info.requested_size += block.requested;
      info.allocated_size += block_info.allocated ? block.size : 0;
    }
    info.blocks.push_back(std::move(block_info));
  }
  return info;
}

TraceEntry::Action torch_action(uint32_t action) {
  switch (action) {
    case RALLOCATOR_ALLOC:
      return TraceEntry::ALLOC;
    case RALLOCATOR_FREE_REQUESTED:
      return TraceEntry::FREE_REQUESTED;
    case RALLOCATOR_FREE_COMPLETED:
      return TraceEntry::FREE_COMPLETED;
    case RALLOCATOR_SEGMENT_ALLOC:
      return TraceEntry::SEGMENT_ALLOC;
    case RALLOCATOR_SEGMENT_FREE:
      return TraceEntry::SEGMENT_FREE;
    case RALLOCATOR_SEGMENT_MAP:
      return TraceEntry::SEGMENT_MAP;
    case RALLOCATOR_SEGMENT_UNMAP:
      return TraceEntry::SEGMENT_UNMAP;
    case RALLOCATOR_OOM:
      return TraceEntry::OOM;
#if TORCH_RELEASE >= 214
    case RALLOCATOR_ANNOTATE:
      return TraceEntry::ANNOTATE;
#endif
    default:
      return TraceEntry::SNAPSHOT;
  }
}

TraceEntry trace_entry(const rallocator_event& event) {
  TraceEntry entry(
      torch_action(event.action),
      static_cast<DeviceIndex>(event.device),
      event.address,
      event.size,
      static_cast<cudaStream_t>(event.stream),
      MempoolId_t{event.pool_first, event.pool_second},
      0,
      contexts().find(event.stack),
      *event.compile_context ? event.compile_context : "N/A");
  entry.time_.t_ = event.time_us;
#if TORCH_RELEASE >= 210
  entry.user_metadata_ = event.label;
#endif
  return entry;
}

int64_t now_us() {
  return c10::getTime() / 1000;
}

}  // namespace
}  // namespace rallocator
