"""Object stores and HTTP servers as storages:
`s3://`, `gs://`, `az://`, `http://` and `https://`, through obstore.

address        what a location names: a bucket (or a server) and a key
bucket         what is requested of a bucket: the state of an object, ranges, listings
urls           lists of URLs, by braces and text files; queries of URLs, which are sent and not stored
object_version which version of an object is read
known_objects  what a storage knows of objects: the version of each, and the ends of some
failures       what an error of the client means
endpoints      what is wrong with an endpoint at which nothing is found
credentials    those that obstore does not find by itself
clients        obstore's stores, by bucket and options
loop           the process's event loop, and what happens after a fork
rate_limiter   how many requests are in flight, and at which rate
timing         how long a request may take, learned from those before
in_flight      all requests in flight, which one timer looks at
workers        a few tasks that send many requests
sockets        ranged GETs without the client, whose responses cost more CPU time
retry_policy   when a request is tried again, and when it is given up
bucket_client  one ranged GET: its conditions, retries, time-outs and hedges
listing        objects that match a pattern, found by LIST
store          `ObjectStorage`
prefix         `ObjectPrefix`: whole objects below a prefix, also written
helper         a process that reads for programs which fork later; fork_safe is the storage that uses it
"""
