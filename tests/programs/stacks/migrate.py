"""Migrates a QEMU machine to another one: migrate.py rdma:HOST:PORT or tcp:HOST:PORT. Prints the time."""
import atexit, json, os, socket, subprocess, sys, tempfile, time

uri = sys.argv[1]
folder = tempfile.mkdtemp()
limit = time.monotonic() + 100


class Machine:
    def __init__(self, name, *options):
        path = os.path.join(folder, name)
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-display", "none", "-S",
             "-qmp", f"unix:{path},server,nowait", *options])
        atexit.register(self.end)
        self.socket = socket.socket(socket.AF_UNIX)
        while self.socket.connect_ex(path):
            if self.process.poll() is not None or time.monotonic() > limit:
                sys.exit(f"{name} does not start")
            time.sleep(0.02)
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self.ask("qmp_capabilities")

    def end(self):
        self.process.kill()
        self.process.wait()

    def ask(self, command, **arguments):
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "return" in answer or "error" in answer:
                return answer


target = Machine("target", "-incoming", uri.replace("127.0.0.1", "0.0.0.0"))
# A page of zeros is one byte over TCP: the memory has contents.
contents = os.path.join(folder, "contents")
with open(contents, "wb") as file:
    file.write(os.urandom(192 << 20))
source = Machine("source", "-device", f"loader,file={contents},addr=0x2000000,force-raw=on")
os.unlink(contents)
source.ask("migrate-set-parameters", **{"max-bandwidth": 10 << 30})
answer = source.ask("migrate", uri=uri)
if "error" in answer:
    sys.exit(f"migrate: {answer}")
while True:
    seen = source.ask("query-migrate")["return"]
    if seen.get("status") in ("completed", "failed", "cancelled") or time.monotonic() > limit:
        break
    time.sleep(0.02)
print(seen.get("status"), seen.get("total-time"), "ms")
sys.exit(seen.get("status") != "completed")
