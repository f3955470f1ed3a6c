// The order of what happens on simulated devices. Free of torch.
//
// Work runs at once, on the host. Whether it may have run in another order on a device is told by vector clocks: each
// stream counts its launches, and knows how far the other streams were when it waited for one of their events. Two
// accesses to the same bytes, of which one writes, are a race where neither stream knows of the other's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simcuda {

using Clock = std::vector<uint64_t>;  // by queue: how many of its launches have ended

inline uint64_t at(const Clock& clock, int queue) {
  return static_cast<size_t>(queue) < clock.size() ? clock[queue] : 0;
}

inline void advance(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

struct Access {
  size_t begin, end;  // bytes of the block
  int queue;
  uint64_t time;
  bool writes;
  std::string by;

  std::string doing() const { return by + (writes ? " writes" : " reads"); }
};

struct Block {  // of device memory
  size_t size;
  int device, queue;
  std::vector<Access> accesses;
  std::set<int> recorded;  // queues that record_stream has named
};

struct Freed {  // memory that another queue may still use
  int queue;
  size_t size;
  std::vector<Access> open;
};

struct Observation {
  std::string kind, what;  // kind: "race" or "wait"
};

// Not locked by itself: hold ``lock`` while a method runs.
class Timeline {
 public:
  std::recursive_mutex lock;
  std::map<std::string, int64_t> launches;
  std::vector<std::string> order;  // of launches, where ``keeps_order``
  std::vector<Observation> unseen;
  std::vector<size_t> held, peak, limit;  // bytes by device
  int64_t shortages = 0;                  // how often a device had no room
  int64_t to_device = 0, to_host = 0;     // bytes
  bool keeps_order = false;

  explicit Timeline(int devices) : held(devices), peak(devices), limit(devices, size_t{1} << 34) {}

  int queue(int device, int64_t stream) {
    auto [found, is_new] = queues_.emplace(std::make_pair(device, stream), static_cast<int>(queues_.size()));
    if (is_new) {
      clocks_.emplace_back();
      names_.push_back("cuda:" + std::to_string(device) + " stream " + std::to_string(stream));
    }
    return found->second;
  }

  const std::string& name(int queue) const { return names_[queue]; }
  const Clock& clock(int queue) const { return clocks_[queue]; }

  uint64_t launch(int queue, const std::string& by) {
    if (!by.empty()) {
      launches[by]++;
      if (keeps_order) order.push_back(by + " on " + names_[queue]);
    }
    advance(clocks_[queue], host_);  // the host launches it after what it has waited for
    Clock& clock = clocks_[queue];
    clock.resize(std::max(clock.size(), static_cast<size_t>(queue) + 1));
    return ++clock[queue];
  }

  void follow(int queue, const Clock& clock) { advance(clocks_[queue], clock); }

  void host_waits(const Clock& clock, const std::string& why) {
    advance(host_, clock);
    unseen.push_back({"wait", why});
  }

  void host_waits_for_device(int device) {
    Clock all;
    for (const auto& [key, queue] : queues_)
      if (key.first == device) advance(all, clocks_[queue]);
    host_waits(all, "synchronize");
  }

  // False where the device has no room.
  bool has_room(int device, size_t size) {
    const bool fits = held[device] + size <= limit[device];
    shortages += !fits;
    return fits;
  }

  void allocate(char* address, size_t size, int device, int queue) {
    advance(clocks_[queue], host_);
    std::vector<Freed> kept;
    for (const Freed& each : freed_) {
      const Access* open = each.queue == queue ? first_open(each.open, clocks_[queue]) : nullptr;
      if (each.queue != queue || (open && size > each.size)) {
        kept.push_back(each);
      } else if (open) {
        unseen.push_back({"race", "memory of " + names_[queue] + " is given out again, while " + open->doing() +
                                      " on " + names_[open->queue] + ": record_stream is missing"});
      }
    }
    freed_.swap(kept);
    blocks_[address] = Block{size, device, queue, {}, {}};
    held[device] += size;
    peak[device] = std::max(peak[device], held[device]);
  }

  void free(char* address) {
    auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    const Block& block = found->second;
    held[block.device] -= block.size;
    Clock known = clocks_[block.queue];
    advance(known, host_);
    std::vector<Access> open;
    for (const Access& each : block.accesses)
      if (at(known, each.queue) < each.time && !block.recorded.count(each.queue)) open.push_back(each);
    if (!open.empty()) freed_.push_back({block.queue, block.size, std::move(open)});
    blocks_.erase(found);
  }

  void record_stream(const char* address, int queue) {
    auto found = blocks_.find(const_cast<char*>(address));
    if (found != blocks_.end()) found->second.recorded.insert(queue);
  }

  int device_of(const char* address) {
    auto found = containing(address);
    return found == blocks_.end() ? -1 : found->second.device;
  }

  void access(const char* address, size_t size, bool writes, int queue, uint64_t time, const std::string& by) {
    auto found = containing(address);
    if (found == blocks_.end() || !size) return;
    const size_t begin = address - found->first, end = begin + size;
    const Clock& known = clocks_[queue];
    std::vector<Access> kept;
    for (Access& before : found->second.accesses) {
      const bool ordered = before.queue == queue || at(known, before.queue) >= before.time;
      if (before.begin < end && begin < before.end && (before.writes || writes) && !ordered)
        unseen.push_back({"race", by + (writes ? " writes" : " reads") + " on " + names_[queue] + " what " +
                                      before.doing() + " on " + names_[before.queue] + ", and nothing orders them"});
      const bool covered = before.begin >= begin && before.end <= end && ordered &&
          (writes || (before.queue == queue && !before.writes));
      if (!covered) kept.push_back(std::move(before));
    }
    kept.push_back({begin, end, queue, time, writes, by});
    found->second.accesses.swap(kept);
  }

 private:
  std::map<char*, Block>::iterator containing(const char* address) {
    auto found = blocks_.upper_bound(const_cast<char*>(address));
    if (found == blocks_.begin()) return blocks_.end();
    --found;
    return address < found->first + std::max<size_t>(found->second.size, 1) ? found : blocks_.end();
  }

  static const Access* first_open(const std::vector<Access>& accesses, const Clock& known) {
    for (const Access& each : accesses)
      if (at(known, each.queue) < each.time) return &each;
    return nullptr;
  }

  std::map<std::pair<int, int64_t>, int> queues_;  // (device, stream) -> queue
  std::vector<Clock> clocks_;
  std::vector<std::string> names_;
  Clock host_;
  std::map<char*, Block> blocks_;
  std::vector<Freed> freed_;
};

}  // namespace simcuda
